"""Vision families: the seam, and each family against transformers."""
