"""Towers over pictures of one size: a picture is one tile of them, or is cut into several."""
