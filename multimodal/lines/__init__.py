"""Towers whose heads turn by row and column, over pictures of any size; cells are projected, or merged before."""
