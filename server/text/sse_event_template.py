"""Events of a stream that differ in a few values alone: most are, and a model for each costs ten times its bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode
"""The JSON of a value, as models write it."""


def make_text_mark() -> str:
    """A text that nobody else writes."""
    return secrets.token_hex(16)


def make_number_mark() -> int:
    """A number that nobody else writes."""
    return 10**20 + secrets.randbelow(10**20)


class SseEventTemplate:
    """An event with holes.

    Args:
        event: its bytes, with marks where values belong.
        marks: the bytes of each value's mark; it may stand in several places, or nowhere.
    """

    def __init__(self, event: bytes, marks: Sequence[bytes]) -> None:
        positions = sorted((at, i) for i, one in enumerate(marks) for at in _find_mark(event, one))
        parts, end = [], 0
        for at, i in positions:
            parts.append(event[end:at])
            end = at + len(marks[i])
        parts.append(event[end:])
        self._format = b"%b".join(part.replace(b"%", b"%%") for part in parts)
        order = [i for _, i in positions]
        self._pick: Callable[[Any], Any] | None = None
        if order != [*range(len(marks))]:
            self._pick = itemgetter(*order)

    def fill(self, *values: bytes) -> bytes:
        """The event with ``values``, one for each mark."""
        return self._format % (values if self._pick is None else self._pick(values))


def _find_mark(event: bytes, one: bytes) -> list[int]:
    found, at = [], event.find(one)
    while at >= 0:
        found.append(at)
        at = event.find(one, at + len(one))
    return found
