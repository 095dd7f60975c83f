"""Attention by the optional libraries FlashAttention and FlashInfer, selected by ``--attention-backend``."""
