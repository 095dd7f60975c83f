"""The bounded queue: requests, tokens and pixels that are inside the server at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from trencadis.core.errors import BadRequest, QueueFull

NAMES = ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_queued_pixels")


@dataclass(frozen=True)
class Bounds:
    """What may be inside at a time, running or waiting."""

    requests: int = 2048
    tokens: int = 8 << 20
    pixels: int = 1 << 30


class Admission:
    """Counts what is inside and refuses what would exceed a bound. One event loop only."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.inside = [0, 0, 0]
        self.rejected = dict.fromkeys(NAMES, 0)

    def enter(self, requests: int = 1) -> Ticket:
        """A place for ``requests`` choices; tokens and pixels are charged when they are known.

        Raises:
            BadRequest: more than could ever be admitted.
            QueueFull: full now.
        """
        ticket = Ticket(self)
        ticket.charge(requests=requests)
        return ticket

    def take(self, wanted: tuple[int, int, int], held: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Adds to what is inside, of which the caller holds ``held``; or raises as ``enter`` does."""
        bounds = (self.bounds.requests, self.bounds.tokens, self.bounds.pixels)
        for i, (inside, more, bound) in enumerate(zip(self.inside, wanted, bounds, strict=True)):
            if held[i] + more > bound:
                # Waiting would not help: its own part is too much.
                raise BadRequest(f"The request needs {held[i] + more} of at most {bound} ({NAMES[i]}).")
            if inside + more > bound:
                self.rejected[NAMES[i]] += 1
                raise QueueFull(f"The queue is full ({NAMES[i]}); try again later.", retry_after=self.wait())
        self.inside = [a + b for a, b in zip(self.inside, wanted, strict=True)]

    def give(self, held: tuple[int, int, int]) -> None:
        """Takes away what a ticket held."""
        self.inside = [a - b for a, b in zip(self.inside, held, strict=True)]

    def wait(self) -> int:
        """Seconds to name in Retry-After: a guess that grows with what is inside."""
        return max(1, min(30, self.inside[0] // 64))


@dataclass
class Ticket:
    """What one HTTP request holds; given back once, by ``leave`` or the end of a ``with``."""

    admission: Admission
    held: tuple[int, int, int] = field(default=(0, 0, 0))
    left: bool = False

    def charge(self, *, requests: int = 0, tokens: int = 0, pixels: int = 0) -> None:
        """Holds more, or raises as ``Admission.enter`` does; nothing once it was given back."""
        if self.left:
            return
        self.admission.take((requests, tokens, pixels), self.held)
        self.held = (self.held[0] + requests, self.held[1] + tokens, self.held[2] + pixels)

    def leave(self) -> None:
        """Gives everything back; a second call does nothing."""
        self.left = True
        held, self.held = self.held, (0, 0, 0)
        self.admission.give(held)
