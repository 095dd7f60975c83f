"""Gemma-3 with images: SigLIP's tower, means of its patches, tokens of an image that see each other."""
