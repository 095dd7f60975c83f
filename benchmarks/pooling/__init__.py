"""Embeddings: concurrent requests, one request, and transformers."""
