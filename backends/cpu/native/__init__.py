"""The CPU's own kernels: products of weights of 8 and 4 bits, in C."""
