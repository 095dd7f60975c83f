"""Towers over pictures of any size: places between those of a table, rows of parts for the decoder's first layers."""
