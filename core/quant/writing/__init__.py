"""Writes a 16-bit checkpoint again in 8 or 4 bits, as compressed-tensors files (``trencadis quantize``)."""
