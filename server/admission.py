"""The bounded queue: requests, tokens and pixels that are inside the server at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.errors import BadRequest, QueueFull

NAMES = ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_queued_pixels")
WINDOW = 60.0
"""Seconds over which departures are counted."""
LONGEST = 120
"""Most seconds that Retry-After names."""


class Amounts(NamedTuple):
    """What is charged, in the order of ``NAMES``."""

    requests: int = 0
    tokens: int = 0
    pixels: int = 0


NOTHING = Amounts()


@dataclass(frozen=True)
class Bounds:
    """What may be inside at a time, running or waiting. A resized pixel costs 6 bytes of this process's memory: three
    colours, each stored for two frames."""

    requests: int = 2048
    tokens: int = 8 << 20
    pixels: int = 1 << 30
    body_bytes: int = 1 << 30

    def all(self) -> Amounts:
        """What tickets are charged with, in the order of ``NAMES``."""
        return Amounts(self.requests, self.tokens, self.pixels)


class Admission:
    """Counts what is inside and refuses what would exceed a bound. One event loop only."""

    def __init__(self, bounds: Bounds | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounds = bounds or Bounds()
        self.bodies = BodyBudget(self.bounds.body_bytes)
        self.inside = [0, 0, 0]
        self.rejected = dict.fromkeys(NAMES, 0)
        self._clock = clock
        self._left: deque[tuple[float, Amounts]] = deque()

    def enter(self, requests: int = 1) -> Ticket:
        """A place for ``requests`` choices; tokens and pixels are charged when they are known.

        Raises:
            BadRequest: more than could ever be admitted.
            QueueFull: full now.
        """
        ticket = Ticket(self)
        ticket.charge(requests=requests)
        return ticket

    def take(self, wanted: Amounts, held: Amounts = NOTHING) -> None:
        """Adds to what is inside, of which the caller holds ``held``; or raises as ``enter`` does."""
        for i, (inside, more, bound) in enumerate(zip(self.inside, wanted, self.bounds.all(), strict=True)):
            if held[i] + more > bound:
                # Waiting would not help: its own part is too much.
                raise BadRequest(f"The request needs {held[i] + more} of at most {bound} ({NAMES[i]}).")
            if more and inside + more > bound:
                self.rejected[NAMES[i]] += 1
                wait = self.wait(i, inside + more - bound)
                raise QueueFull(f"The queue is full ({NAMES[i]}); try again later.", retry_after=wait)
        self.inside = [a + b for a, b in zip(self.inside, wanted, strict=True)]

    def give(self, held: Amounts) -> None:
        """Takes away what a ticket held."""
        self.inside = [a - b for a, b in zip(self.inside, held, strict=True)]
        self._left.append((self._clock(), held))
        self._trim()

    def wait(self, which: int, excess: int) -> int:
        """Seconds for Retry-After: until ``excess`` of ``NAMES[which]`` has left, at the rate of the last minute.

        Before anything has left it is a guess that grows with what is inside.
        """
        self._trim()
        gone = sum(held[which] for _, held in self._left)
        if not gone:
            return max(1, min(30, self.inside[0] // 64))
        seconds = max(self._clock() - self._left[0][0], 1.0)
        return max(1, min(LONGEST, round(excess * seconds / gone + 0.5)))

    def _trim(self) -> None:
        start = self._clock() - WINDOW
        while self._left and (self._left[0][0] < start or len(self._left) > 4096):
            self._left.popleft()


@dataclass
class Ticket:
    """What one HTTP request holds; given back once, by ``leave`` or the end of a ``with``."""

    admission: Admission
    held: Amounts = NOTHING
    left: bool = False

    def charge(self, *, requests: int = 0, tokens: int = 0, pixels: int = 0) -> None:
        """Holds more, or raises as ``Admission.enter`` does; nothing once it was given back."""
        if self.left:
            return
        held = self.held
        self.admission.take(Amounts(requests, tokens, pixels), held)
        self.held = Amounts(held.requests + requests, held.tokens + tokens, held.pixels + pixels)

    def leave(self) -> None:
        """Gives everything back; a second call does nothing."""
        if self.left:
            return
        self.left = True
        held, self.held = self.held, NOTHING
        self.admission.give(held)


class BodyBudget:
    """Bytes of request bodies in this process, from their arrival until their media are prepared. One event loop only.

    Args:
        bound: most bytes at a time; one body may always come in.
    """

    def __init__(self, bound: int = 1 << 30) -> None:
        self.bound = bound
        self.inside = 0
        self.rejected = 0

    def open(self) -> BodyCharge:
        """The account of one request."""
        return BodyCharge(self)


@dataclass
class BodyCharge:
    """Bytes of one body."""

    budget: BodyBudget
    held: int = 0
    done: bool = False

    def room(self, count: int) -> None:
        """Raises QueueFull where other bodies leave no room for ``count`` bytes more; charges nothing."""
        budget = self.budget
        if budget.inside + count > budget.bound and budget.inside > self.held:
            budget.rejected += 1
            raise QueueFull("Too many large requests are being read; try again later.", retry_after=1)

    def charge(self, count: int) -> None:
        """``count`` bytes more have come.

        Raises:
            QueueFull: other bodies leave no room for them.
        """
        if not self.done and count:
            self.room(count)
            self.held += count
            self.budget.inside += count

    def leave(self) -> None:
        """The bytes are gone; a second call does nothing."""
        self.budget.inside -= self.held
        self.held, self.done = 0, True
