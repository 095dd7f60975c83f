"""What a replica has been given and has not finished, and how long a new request would wait there."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.server.routing.costs import RECENT, StepCosts


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
    """

    def __init__(self, costs: StepCosts, rows: int = 0, room: int = 0) -> None:
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

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + self.decoding

    def wait(self, now: float, tokens: int = 0) -> float:
        """Seconds until a request of ``tokens`` tokens, sent now, would be computed.

        Work in front of it, less what must have been done of the oldest request since the replica last showed progress;
        the decoding rows of each step until then; and, where rows or KV blocks are used up, the time until enough
        requests have ended.
        """
        c, seconds = self.costs, self.queued
        if self._waiting:
            oldest = next(iter(self._waiting)).seconds
            seconds = max(seconds - min(now - self._moved, oldest), 0.0)
        if self.decoding or self._waiting:
            # Half of the step that runs, the steps in front, and the other rows of its own; that step itself all have.
            rows = self.decoding * c.row
            steps = 0.5 + seconds / max(c.chunk * c.token, 1e-9)
            seconds += steps * (c.step + rows) + rows
        return seconds + self._crowded(tokens)

    def _crowded(self, tokens: int) -> float:
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

    def began(self, ticket: Assignment, now: float) -> None:
        """Its first token came; more than once is once."""
        if ticket in self._waiting:
            del self._waiting[ticket]
            self.queued = self.queued - ticket.seconds if self._waiting else 0.0
            self.decoding += 1
            self._moved, ticket.since, ticket.begun = now, now, True

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
