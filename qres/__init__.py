"""Quantization-robustness analysis for GGUF models, seen from the residual stream."""
