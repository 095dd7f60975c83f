"""Gemma-3 with pictures: SigLIP's tower, means of its patches, tokens of a picture that see each other."""
