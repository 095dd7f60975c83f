"""A CPU twin of an NVIDIA device: runtime, ops and the recording that replaces a graph."""
