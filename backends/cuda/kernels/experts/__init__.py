"""Experts: the routing of tokens, and the grouped products."""
