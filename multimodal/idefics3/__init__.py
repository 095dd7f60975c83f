"""Idefics3: tiles of an image, each preceded by a token of its row and column, then the whole image."""
