"""Levels made by llama.cpp's quantizer, kept by content."""
