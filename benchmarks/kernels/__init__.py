"""Kernels against their physical limits: ``python -P -m benchmarks.kernels``."""
