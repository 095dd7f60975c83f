"""Readers: one file a format, from a checkpoint's tensors to a ``QTensor``."""
