"""The CPU's own kernels, in C, and the row counts that oneDNN is called with."""
