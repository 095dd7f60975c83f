"""The CUDA backend (not built yet)."""
