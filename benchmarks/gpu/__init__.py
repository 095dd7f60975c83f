"""Every claim about a GPU, measured in one command: ``python -P -m benchmarks.gpu``."""
