"""LFM2-VL: tiles of an image, each after a token of its row and column, then the whole image in its own shape."""
