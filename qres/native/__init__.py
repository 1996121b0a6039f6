"""The border to llama.cpp: only the modules in here import `ctypes` and `llama_cpp`."""
