"""KV cache blocks, the prefix cache, and the rows of the image arena."""
