"""Pixtral's vision tower: images of any size, rotary positions by row and column, RMS norms."""
