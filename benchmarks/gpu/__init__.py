"""Every claim about a GPU, measured in one command: ``PYTHONPATH=$PWD python -P -m benchmarks.gpu``."""
