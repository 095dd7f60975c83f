"""Planned shapes: axes, options, closure, costs, pruning, and the planner that joins them."""
