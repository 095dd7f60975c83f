"""Embeddings, classes and scores."""
