"""What the benchmarks share: servers, load, sides to compare, checkpoints and figures."""
