"""Mllama's vision tower: local and gated global layers over all tiles of an image.

The decoder cross-attends to its rows.
"""
