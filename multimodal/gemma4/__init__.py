"""Gemma-4 with images."""
