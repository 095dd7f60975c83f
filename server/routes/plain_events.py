"""Events of a stream that differ in one text alone: most are, and a model for each costs ten times its bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

_encode = msgspec.json.Encoder().encode


class PlainEvents:
    """Cuts one event of each choice at its text, and puts every later text between the two ends.

    Args:
        make: the bytes of an event of a choice that says a text and nothing else.
    """

    def __init__(self, make: Callable[[int, str], bytes]) -> None:
        self._make = make
        self._ends: dict[int, tuple[bytes, bytes]] = {}

    def of(self, choice: int, text: str) -> bytes:
        """The event that says ``text``, as ``make`` would write it."""
        ends = self._ends.get(choice)
        if ends is None:
            mark = secrets.token_hex(16)
            head, _, tail = self._make(choice, mark).partition(_encode(mark))
            ends = self._ends[choice] = head, tail
        return ends[0] + _encode(text) + ends[1]
