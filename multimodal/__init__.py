"""Media to pixels to patches to 112-aligned buckets to embeddings."""
