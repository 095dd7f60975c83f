"""Families that transformers has not, or that another package has."""
