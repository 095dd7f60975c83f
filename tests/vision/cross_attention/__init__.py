"""Families whose layers attend to images, against transformers."""
