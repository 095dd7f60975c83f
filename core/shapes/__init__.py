"""Planned shapes: axes, options, reachable needs, costs, pruning, and the planner."""
