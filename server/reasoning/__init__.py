"""Reasoning: which tags a model thinks between, and the parser that takes its thoughts out of an answer."""
