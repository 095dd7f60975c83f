"""LLaVA-NeXT (LLaVA-1.6): CLIP's tower over tiles of an image.

The prompt contains the patches of all tiles line by line.
"""
