"""Pixtral's image processor: images of any size; a token ends each row of cells."""
