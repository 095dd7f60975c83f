"""Reasoning: the tags around it, and the parser that separates it from an answer."""
