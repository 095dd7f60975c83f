"""Triton kernels, one file a concept; each exports typed functions that launch it and allocate nothing."""
