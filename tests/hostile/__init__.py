"""Attackers: hostile files, servers and mutations, and faults planted in a backend."""
