"""Attention over rectangles: prompts without and with context, decoding over a flat list of blocks, images."""
