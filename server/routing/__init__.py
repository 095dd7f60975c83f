"""Chooses the replica of each request. Pure: no I/O and no clock of its own, so that a simulator runs the same code."""
