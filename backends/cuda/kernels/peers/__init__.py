"""Sums of small messages over the memory of peers: each rank reads what the others left there."""
