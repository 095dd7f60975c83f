"""Models, each written once for all backends: the decoder, its layers and their shards, and its loader."""
