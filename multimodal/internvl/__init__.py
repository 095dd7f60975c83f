"""InternVL3: tiles of an image and the image once more, small."""
