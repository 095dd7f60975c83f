"""The CPU backend: the reference ops and their fast twins."""
