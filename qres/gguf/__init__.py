"""What a GGUF file is and holds, from its header; the model is not loaded."""
