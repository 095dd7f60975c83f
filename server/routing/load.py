"""What a replica has been given and has not finished, and how long a new request would wait there."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from trencadis.server.routing.costs import RECENT, StepCosts

LINE = 8
"""Numbers of a replica in the array that decisions read: a line of a processor's cache.

Seconds that any request waits; seconds of queued work, when the replica last showed progress, seconds of the oldest
request, and what each of those seconds takes with the steps around it; tokens for which it has room.
"""

BASE, QUEUED, MOVED, OLDEST, FACTOR, SPARE = range(6)


def uncrowded(lines: array[float], at: int, now: float) -> float:
    """Seconds that a request waits at the replica whose line begins at ``at``, as long as there is room for it."""
    seconds = lines[at]
    queued = lines[at + QUEUED]
    if queued > 0:
        passed, oldest = now - lines[at + MOVED], lines[at + OLDEST]
        queued -= passed if passed < oldest else oldest
        if queued > 0:
            seconds += queued * lines[at + FACTOR]
    return seconds


@dataclass(slots=True, eq=False)
class Assignment:
    """One request at one replica: what it was charged when it was sent there, in seconds, and its tokens."""

    replica: int
    seconds: float
    tokens: int
    begun: bool = False
    since: float = 0.0


class ReplicaLoad:
    """The open requests of one replica.

    Args:
        costs: of its steps.
        rows: requests that it runs at a time; 0: any number.
        room: tokens that its KV cache holds; 0: any number.
        lines: where it keeps what decisions read, from ``at`` on; None: an array of its own.
    """

    def __init__(
        self, costs: StepCosts, rows: int = 0, room: int = 0, lines: array[float] | None = None, at: int = 0
    ) -> None:
        self.costs = costs
        self.rows = rows
        self.room = room
        self.queued = 0.0
        """Seconds of work that was charged to requests without a first token."""
        self.tokens = 0
        """Prompt tokens of open requests."""
        self.decoding = 0
        self.life = 0.0
        """Mean seconds from a request's first token to its end."""
        self._waiting: dict[Assignment, None] = {}
        self._moved = 0.0
        self._lines = array("d", bytes(8 * LINE)) if lines is None else lines
        self._at = at
        self._changed()

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + self.decoding

    def wait(self, now: float, tokens: int = 0) -> float:
        """Seconds until a request of ``tokens`` tokens, sent now, would be computed.

        Work in front of it, less what must have been done of the oldest request since the replica last showed progress;
        the decoding rows of each step until then; and, where rows or KV blocks are used up, the time until enough
        requests have ended. Costs are those at the last change of what is open.
        """
        seconds = uncrowded(self._lines, self._at, now)
        return seconds + self.crowded(tokens) if tokens > self._lines[self._at + SPARE] else seconds

    def _changed(self) -> None:
        """Writes the line: it is read more often than anything changes."""
        c, base, factor, oldest = self.costs, 0.0, 1.0, 0.0
        if self._waiting or self.decoding:
            # Half of the step that runs, the steps in front, and the other rows of its own; that step itself all have.
            rows = self.decoding * c.row
            step = c.step + rows
            factor = 1 + step / max(c.chunk * c.token, 1e-9)
            base = 0.5 * step + rows
            oldest = next(iter(self._waiting)).seconds if self._waiting else 0.0
        spare = self.room - self.tokens if self.room else math.inf
        if self.rows and self.open >= self.rows:
            spare = -math.inf
        at, lines = self._at, self._lines
        lines[at], lines[at + QUEUED], lines[at + MOVED] = base, self.queued, self._moved
        lines[at + OLDEST], lines[at + FACTOR], lines[at + SPARE] = oldest, factor, spare

    def resized(self, room: int) -> None:
        """Its KV cache holds ``room`` tokens."""
        self.room = room
        self._changed()

    def crowded(self, tokens: int) -> float:
        """Seconds until there is room for a request of ``tokens`` tokens."""
        over = 0.0
        if self.rows:
            over = (self.open + 1 - self.rows) / self.rows
        if self.room:
            over = max(over, (self.tokens + tokens - self.room) / self.room)
        return over * max(self.life, 1.0) if over > 0 else 0.0

    def charge(self, ticket: Assignment, now: float) -> None:
        """A request is sent here."""
        if not self._waiting:
            self._moved = now
        ticket.since = now
        self._waiting[ticket] = None
        self.queued += ticket.seconds
        self.tokens += ticket.tokens
        self._changed()

    def began(self, ticket: Assignment, now: float) -> None:
        """Its first token came; more than once is once."""
        if ticket in self._waiting:
            del self._waiting[ticket]
            self.queued = self.queued - ticket.seconds if self._waiting else 0.0
            self.decoding += 1
            self._moved, ticket.since, ticket.begun = now, now, True
            self._changed()

    def ended(self, ticket: Assignment, now: float) -> None:
        """It has ended, with or without a token."""
        self.tokens -= ticket.tokens
        if ticket.begun:
            self.decoding -= 1
            self.life += (RECENT if self.life else 1.0) * (now - ticket.since - self.life)
        elif ticket in self._waiting:
            del self._waiting[ticket]
            self.queued = self.queued - ticket.seconds if self._waiting else 0.0
            self._moved = now
        self._changed()
