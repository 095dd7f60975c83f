"""Which replica a request goes to. Pure: no I/O and no clock of its own, so that a simulator runs the same code."""
