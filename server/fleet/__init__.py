"""Several engines as one, in one API process: ``--data-parallel-size``."""
