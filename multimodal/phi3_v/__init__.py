"""Phi-3.5-vision, Phi-3-vision and VLM2Vec-Full: CLIP over tiles of an image and over the whole of it, made small."""
