"""Execution of a Step: split into launches, host inputs, persistent tensors, and the runner."""
