"""Mllama's vision tower: local and gated global layers over all tiles of an image; the decoder attends to its rows."""
