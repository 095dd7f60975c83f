"""Attention by libraries that users may install: FlashAttention and FlashInfer, by op, where they are asked for."""
