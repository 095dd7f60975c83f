"""Host inputs of CUDA launches: sizes, work items, and the buffers that one copy fills."""
