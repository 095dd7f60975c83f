"""Families whose layers attend to pictures, against transformers."""
