"""Layers: they own parameters and their shards; the backend's ops do the arithmetic."""
