"""Pixtral's tower: pictures of any size, whose lines end with a token."""
