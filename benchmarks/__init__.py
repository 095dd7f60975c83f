"""Measurements: each module is a program, ``python -m benchmarks.NAME``; ``run.py`` calls them all."""
