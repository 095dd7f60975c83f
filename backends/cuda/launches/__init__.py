"""Host inputs of CUDA launches: sizes, splits, and the buffers that one copy fills."""
