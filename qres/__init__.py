"""Quantization-robustness analysis for GGUF models, seen from the residual stream."""

__version__ = "0.1.0"
