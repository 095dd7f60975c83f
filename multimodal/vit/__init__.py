"""Vision transformers over tiles of one size; an image is one tile or is cut into several."""
