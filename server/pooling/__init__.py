"""Embeddings, classes and scores: fields of pooling requests, their prompts, and results from pooled values."""
