"""The backends: one subpackage per device; the CPU backend is the reference that the others inherit from."""
