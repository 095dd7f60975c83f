"""Kernels over codes of 8 and 4 bits: products with quantised weights, and an 8-bit KV cache."""
