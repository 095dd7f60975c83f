"""How much of the time background warm-up may take while requests run. Pure."""

from __future__ import annotations


class Pace:
    """Work is allowed while what it took, with what it will take, stays within ``stall`` of the time under load.

    Args:
        stall: share of wall time; 0 leaves the work to idle times.
        slice: seconds that one pause between steps may last where several pieces fit; 0: one piece a pause. One piece
            is never cut, so a pause lasts as long as a compilation at most, or this long.
    """

    def __init__(self, stall: float, slice: float = 0.0) -> None:
        self.stall, self.slice = stall, slice
        self.spent = 0.0
        self.loaded = 0.0
        self.longest = 0.0

    def under_load(self, seconds: float) -> None:
        """Time that passed with requests in the engine, warm-up included."""
        self.loaded += seconds

    def allows(self, loaded: bool) -> bool:
        """Whether one more piece of work may run now; it is taken to be as long as the longest so far."""
        return not loaded or self.spent + self.longest < self.stall * self.loaded

    def another(self, paused: float, loaded: bool) -> bool:
        """Whether one more piece fits in a pause that has lasted ``paused`` seconds."""
        return paused + self.longest <= self.slice and self.allows(loaded)

    def worked(self, seconds: float, loaded: bool) -> None:
        """A piece of work took ``seconds``."""
        self.longest = max(0.9 * self.longest, seconds)
        if loaded:
            self.spent += seconds
