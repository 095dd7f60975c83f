"""Quantised weights: schemes, quantised tensors, and ``trencadis quantize``."""
