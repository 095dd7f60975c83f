"""Kernels over 8-bit and 4-bit codes: products with quantised weights, and an 8-bit KV cache."""
