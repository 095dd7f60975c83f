"""Cross-attention of text to images whose keys and values are in the image arena."""
