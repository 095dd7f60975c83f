"""Quantised weights: what a scheme means, tensors of it, and the readers of checkpoint formats."""
