"""Phi-3.5-vision, Phi-3-vision and VLM2Vec-Full: CLIP over the tiles of an image and over a downscaled copy of it."""
