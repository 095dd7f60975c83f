"""Vision tower with interpolated position embeddings and DeepStack outputs for the decoder's first layers."""
