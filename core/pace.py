"""How much of the time background warm-up may take while requests run. Pure."""

from __future__ import annotations


class Pace:
    """Work is allowed while what it took, with what it will take, stays within ``stall`` of the time under load.

    Args:
        stall: share of wall time; 0 leaves the work to idle times.
    """

    def __init__(self, stall: float) -> None:
        self.stall = stall
        self.spent = 0.0
        self.loaded = 0.0
        self.longest = 0.0

    def under_load(self, seconds: float) -> None:
        """Time that passed with requests in the engine, warm-up included."""
        self.loaded += seconds

    def allows(self, loaded: bool) -> bool:
        """Whether one more piece of work may run now; it is taken to be as long as the longest so far."""
        return not loaded or self.spent + self.longest < self.stall * self.loaded

    def worked(self, seconds: float, loaded: bool) -> None:
        """A piece of work took ``seconds``."""
        self.longest = max(0.9 * self.longest, seconds)
        if loaded:
            self.spent += seconds
