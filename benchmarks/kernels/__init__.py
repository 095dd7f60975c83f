"""Kernels against their physical limits: ``PYTHONPATH=$PWD python -P -m benchmarks.kernels``."""
