"""Pixtral's tower: images of any size, whose lines end with a token."""
