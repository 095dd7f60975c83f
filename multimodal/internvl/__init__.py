"""InternVL3: tiles of an image, and a small version of the whole image."""
