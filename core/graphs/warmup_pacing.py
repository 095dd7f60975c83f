"""Limits the time that background warm-up takes from running requests. Pure."""

from __future__ import annotations


class WarmupPacing:
    """Allows background warm-up while its share of the time under load, including the next unit, is below ``stall``.

    Args:
        stall: fraction of wall time; 0: warm-up runs only while there are no requests.
        slice: seconds of units between two steps; 0: one unit. A unit cannot be interrupted, so a pause lasts this
            long, or as long as one compilation.
    """

    def __init__(self, stall: float, slice: float = 0.0) -> None:
        self.stall, self.slice = stall, slice
        self.spent = 0.0
        self.loaded = 0.0
        self.longest = 0.0

    def add_loaded_time(self, seconds: float) -> None:
        """Adds time that passed with requests in the engine, warm-up included."""
        self.loaded += seconds

    def allows(self, loaded: bool) -> bool:
        """Returns True if one more unit may run now; it is assumed to take as long as the longest so far."""
        return not loaded or self.spent + self.longest < self.stall * self.loaded

    def allows_another(self, paused: float, loaded: bool) -> bool:
        """Returns True if one more unit fits in a pause that has lasted ``paused`` seconds."""
        return paused + self.longest <= self.slice and self.allows(loaded)

    def add_work(self, seconds: float, loaded: bool) -> None:
        """Adds a unit of warm-up that took ``seconds``."""
        self.longest = max(0.9 * self.longest, seconds)
        if loaded:
            self.spent += seconds
