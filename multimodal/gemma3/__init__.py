"""Gemma-3 with images: SigLIP's tower, means of its patches, image tokens that attend to each other."""
