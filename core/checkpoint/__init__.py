"""Reads a checkpoint: its JSON files as frozen values, its weights, and which family it is of."""
