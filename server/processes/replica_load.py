"""The requests that a replica has not finished, and the predicted wait of a new request there."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from trencadis.server.processes.step_costs import RECENT, StepCosts

LINE_WORDS = 8
"""Numbers per replica in the array that decisions read: one cache line of a processor.

They are: seconds that any request waits; seconds of queued work, when the replica last showed progress, seconds of the
oldest request, and what each of those seconds takes with the steps around it; free token capacity.
"""

BASE, QUEUED, MOVED, OLDEST, FACTOR, SPARE = range(6)


def predict_wait(lines: array[float], at: int, now: float) -> float:
    """Predicts the seconds of queueing at the replica whose table row begins at ``at``, if rows and KV capacity
    suffice.
    """
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
    """The open requests of one replica, and its predicted waits.

    Args:
        costs: costs of its steps.
        rows: requests that it runs at a time; 0: any number.
        capacity: tokens that its KV cache holds; 0: any number.
        lines: where it keeps what decisions read, from ``at`` on; None: an array of its own.
    """

    def __init__(
        self, costs: StepCosts, rows: int = 0, capacity: int = 0, table: array[float] | None = None, at: int = 0
    ) -> None:
        self.costs = costs
        self.rows = rows
        self.capacity = capacity
        self.queued = 0.0
        """Seconds of work that was charged to requests without a first token."""
        self.tokens = 0
        """Number of prompt tokens of open requests."""
        self.decoding = 0
        self.life = 0.0
        """Mean seconds from a request's first token to its end."""
        self._waiting: dict[Assignment, None] = {}
        self._moved = 0.0
        self._table = array("d", bytes(8 * LINE_WORDS)) if table is None else table
        self._at = at
        self._update_line()

    @property
    def open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._waiting) + self.decoding

    def wait(self, now: float, tokens: int = 0) -> float:
        """Predicts the seconds until a request of ``tokens`` tokens, sent now, would be computed.

        Adds up the work in front of it, less what must have been done of the oldest request since the replica last
        showed progress; the decoding rows of each step until then; and, if rows or KV blocks are used up, the time
        until enough requests have ended. Costs are those at the last change of the open requests.
        """
        seconds = predict_wait(self._table, self._at, now)
        return seconds + self.predict_capacity_wait(tokens) if tokens > self._table[self._at + SPARE] else seconds

    def _update_line(self) -> None:
        """Recomputes this replica's row of the shared table, which is read more often than it changes."""
        c, base, factor, oldest = self.costs, 0.0, 1.0, 0.0
        if self._waiting or self.decoding:
            # Half of the running step, the steps in front, and the other rows of its own step; every request has that
            # step itself.
            rows = self.decoding * c.row
            step = c.step + rows
            factor = 1 + step / max(c.chunk * c.token, 1e-9)
            base = 0.5 * step + rows
            oldest = next(iter(self._waiting)).seconds if self._waiting else 0.0
        spare = self.capacity - self.tokens if self.capacity else math.inf
        if self.rows and self.open >= self.rows:
            spare = -math.inf
        at, lines = self._at, self._table
        lines[at], lines[at + QUEUED], lines[at + MOVED] = base, self.queued, self._moved
        lines[at + OLDEST], lines[at + FACTOR], lines[at + SPARE] = oldest, factor, spare

    def set_capacity(self, capacity: int) -> None:
        """Sets the number of tokens that its KV cache holds."""
        self.capacity = capacity
        self._update_line()

    def predict_capacity_wait(self, tokens: int) -> float:
        """Predicts the seconds until enough running requests have ended to make room for ``tokens`` tokens; 0 if they
        fit now.
        """
        over = 0.0
        if self.rows:
            over = (self.open + 1 - self.rows) / self.rows
        if self.capacity:
            over = max(over, (self.tokens + tokens - self.capacity) / self.capacity)
        return over * max(self.life, 1.0) if over > 0 else 0.0

    def charge(self, ticket: Assignment, now: float) -> None:
        """Adds a request to the waiting requests of this replica and charges its seconds and tokens."""
        if not self._waiting:
            self._moved = now
        ticket.since = now
        self._waiting[ticket] = None
        self.queued += ticket.seconds
        self.tokens += ticket.tokens
        self._update_line()

    def on_first_token(self, ticket: Assignment, now: float) -> None:
        """Moves a request from waiting to decoding at its first token; later calls do nothing."""
        if ticket in self._waiting:
            del self._waiting[ticket]
            self.queued = self.queued - ticket.seconds if self._waiting else 0.0
            self.decoding += 1
            self._moved, ticket.since, ticket.begun = now, now, True
            self._update_line()

    def on_ended(self, ticket: Assignment, now: float) -> None:
        """Removes a request that has ended, with or without a token, and updates the mean decoding time."""
        self.tokens -= ticket.tokens
        if ticket.begun:
            self.decoding -= 1
            self.life += (RECENT if self.life else 1.0) * (now - ticket.since - self.life)
        elif ticket in self._waiting:
            del self._waiting[ticket]
            self.queued = self.queued - ticket.seconds if self._waiting else 0.0
            self._moved = now
        self._update_line()
