"""A CPU stand-in (twin) for an NVIDIA device: runtime, ops, and the recording that replaces a graph."""
