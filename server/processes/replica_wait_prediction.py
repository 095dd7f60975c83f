"""The load of a replica: its unfinished requests, what their steps cost, and the predicted wait of a new request there.

The cost of steps in seconds is learned from the launches that the replica's engine reports.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

RECENT = 0.05
"""Least weight of a new launch in a mean; the first ones weigh more, the very first one wholly."""

FULL = 256
"""Tokens, and slots, from which a launch has full weight: a small launch is mostly the fixed cost of a step."""

LEAP = 8.0
"""Limit of a launch as a multiple of the mean: a launch that compiled says nothing about the next one."""

ENOUGH = 4.0
"""Launches of its own from which a replica's mean is used; before that it is the mean of all replicas."""


@dataclass(slots=True)
class StepCosts:
    """Seconds of one replica: per prompt token, per VISION slot, per step, and per decoding row of a step.

    The values at the start stand for a 7B model on one card; only their proportions matter until launches are known,
    because all replicas start with the same.

    Args:
        chunk: prompt tokens of one step at most.
        tokens, slots, steps: observed launches of each kind; a launch smaller than ``FULL`` counts in part.
    """

    token: float = 5e-5
    slot: float = 2e-5
    step: float = 8e-3
    row: float = 5e-5
    chunk: int = 2048
    tokens: float = 0.0
    slots: float = 0.0
    steps: float = 0.0

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Updates the cost of a token from a launch that prefilled ``tokens`` tokens in ``seconds``."""
        if tokens > 0 and seconds > 0:
            weight = min(tokens / FULL, 1.0)
            self.tokens += weight
            self.token = _update_mean(self.token, seconds / tokens, self.tokens, weight)

    def observe_encode(self, slots: int, seconds: float) -> None:
        """Updates the cost of a slot from a launch that encoded images of ``slots`` VISION slots in ``seconds``."""
        if slots > 0 and seconds > 0:
            weight = min(slots / FULL, 1.0)
            self.slots += weight
            self.slot = _update_mean(self.slot, seconds / slots, self.slots, weight)

    def observe_decode(self, rows: int, seconds: float) -> None:
        """Updates the cost of a step and of each row from a decoding launch of ``rows`` rows in ``seconds``."""
        if rows > 0 and seconds > 0:
            self.steps += 1.0
            self.step = _update_mean(self.step, max(seconds - rows * self.row, 0.0), self.steps, 1.0)
            self.row = min(self.row, seconds / rows)


def _update_mean(mean: float, seen: float, count: float, weight: float) -> float:
    """Returns the mean after a launch, the ``count``-th one."""
    return mean + min(max(RECENT, 1.0 / count) * weight, 1.0) * (min(seen, LEAP * mean) - mean)


class ReplicaCosts:
    """Step costs per replica; a replica without enough measurements uses the mean of all.

    Otherwise a replica that has run little would look cheap, or expensive, only because of its start values.
    """

    def __init__(self, replicas: int, chunk: int) -> None:
        self.all = StepCosts(chunk=chunk)
        self.each = [StepCosts(chunk=chunk) for _ in range(replicas)]

    def learn(self, replica: int, stage: str, amount: int, seconds: float) -> None:
        """Updates costs from a launch of ``replica``: ``prefill`` (tokens), ``vision`` (slots) or ``decode`` (rows)."""
        for costs in (self.all, self.each[replica]):
            if stage == "prefill":
                costs.observe_prefill(amount, seconds)
            elif stage == "vision":
                costs.observe_encode(amount, seconds)
            else:
                costs.observe_decode(amount, seconds)
        for costs in self.each:
            if costs.tokens < ENOUGH:
                costs.token = self.all.token
            if costs.slots < ENOUGH:
                costs.slot = self.all.slot
            if costs.steps < ENOUGH:
                costs.step, costs.row = self.all.step, self.all.row


Key = int
"""Identifies cached content: the first 8 bytes of a ``BlockHashChain`` key or of an image's arena key, as an
integer.
"""

EVERY_UP_TO, EIGHTH_UP_TO, THEN_EACH = 64, 512, 64
"""Indexed prefix lengths in units: every one up to the first, every 8th up to the second, then every 64th."""


class RoutedImage(NamedTuple):
    """One image of a prompt: the key of its embedding, its VISION slots, and the first token after it."""

    key: Key
    slots: int
    end: int


class RoutedPrefix(NamedTuple):
    """A prefix of a prompt: the key of its last block, and its number of tokens."""

    key: Key
    tokens: int


class RequestCost(NamedTuple):
    """The facts of a request that the router uses.

    Args:
        tokens: number of prompt tokens, placeholders included.
        prefixes: prefixes of the prompt that a replica may hold, ascending.
        images: images of the prompt by ascending offset.
        output: most tokens of the answer.
    """

    tokens: int
    prefixes: Sequence[RoutedPrefix] = ()
    images: Sequence[RoutedImage] = ()
    output: int = 0


def is_indexed_prefix(unit: int) -> bool:
    """True if the prefix of ``unit`` units is stored in the index: lengths are spaced geometrically, to bound keys per
    prompt.

    Neighbouring lengths differ by at most an eighth: the prefix that is found is at most an eighth too short,
    and a request of 128k tokens, in units of 128, has 128 of them. The rule depends on the length alone, so that a
    longer prompt with the same start has the same ones.
    """
    return unit <= EVERY_UP_TO or (unit % 8 == 0 and unit <= EIGHTH_UP_TO) or unit % THEN_EACH == 0


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
