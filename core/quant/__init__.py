"""Quantised weights: schemes, quantised tensors, and readers of checkpoint formats."""
