"""llama.cpp's recorded graph once more, in torch and with gradients."""
