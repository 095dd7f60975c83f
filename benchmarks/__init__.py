"""Measurements: each module is a program, ``python -P -m benchmarks.NAME``; ``run.py`` calls them all."""
