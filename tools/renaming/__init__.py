"""Renames definitions, files and words over the whole repository by maps: ``python -m tools.renaming --check``."""
