"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text at the first complete stop string; of several that end at the same position the longest counts.

    The result depends on the text alone, not on its division into pieces. Only an end that may still become a stop
    string is held back: at most the length of the longest one, less one.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [s for s in stops if s]
        self._longest = max((len(s) for s in self._stops), default=0)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True) -> str:
        """Returns the text that may be sent. If not ``armed`` (before min_tokens), no match may use this text."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        if not armed:
            out, self._held = self._held + text, ""
            return out
        self._held += text
        found = self._first()
        if found is not None:
            start, stop = found
            self.matched = stop
            out, self._held = self._held[: start + len(stop) if self._include else start], ""
            return out
        keep = self._count_undecided()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """Returns the text held back, once the text has ended without a stop string."""
        out, self._held = self._held, ""
        return out

    def _first(self) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _count_undecided(self) -> int:
        """Returns the length of the longest end of the text that begins some stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(len(s) > size and s.startswith(tail) for s in self._stops):
                return size
        return 0
