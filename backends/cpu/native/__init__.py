"""The CPU's own kernels, in C, and the sizes that oneDNN's are asked for."""
