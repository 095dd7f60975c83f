"""InternVL3: tiles of a picture and the picture once more, small."""
