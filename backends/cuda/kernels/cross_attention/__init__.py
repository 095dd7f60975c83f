"""Cross-attention of text to images whose keys and values lie in the image arena."""
