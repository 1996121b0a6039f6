"""The GGUF format byte by byte, strictly or as far as a file can be read."""
