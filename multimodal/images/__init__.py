"""From an image file to patches: headers, decoding, sizes, resizing, and the cache."""
