"""Rewrites a 16-bit checkpoint in 8 or 4 bits, as compressed-tensors files (``trencadis quantize``)."""
