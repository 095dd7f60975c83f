"""Layers over ops: they own parameters and their shards, a backend owns the arithmetic."""
