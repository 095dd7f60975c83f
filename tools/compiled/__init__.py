"""What ahead-of-time compilations of kernels need, kept by what was compiled."""
