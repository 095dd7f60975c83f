"""From a Step to launches: splitting, host inputs, persistent tensors, and the runner that executes them."""
