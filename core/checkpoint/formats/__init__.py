"""Readers that convert a checkpoint's tensors to a ``QTensor``, one file per format."""
