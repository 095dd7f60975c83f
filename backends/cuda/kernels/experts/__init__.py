"""Experts: which tokens go to which of them, and their products."""
