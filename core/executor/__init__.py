"""Executors, which run the ranks of an engine."""
