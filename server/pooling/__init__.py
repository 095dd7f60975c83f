"""Embeddings, classes and scores: what a request asks, its prompts, and what is made of pooled values."""
