"""From an image file to patches: header checks, decoding, resizing, cutting, and the cache."""
