"""From media to embeddings: fetch, decode, resize, cut into patches, pack into windows, run the vision tower."""
