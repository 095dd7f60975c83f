"""Attention of text to pictures whose keys and values lie in the image arena."""
