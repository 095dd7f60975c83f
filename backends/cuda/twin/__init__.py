"""A CPU twin of an NVIDIA device: runtime, ops and the tape that stands for a graph."""
