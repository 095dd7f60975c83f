"""Layers: they own parameters and their shards; the arithmetic is the backend's."""
