"""Blocks of the KV cache, the prefix cache over them, and the rows of the image arena."""
