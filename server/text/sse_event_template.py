"""Events of a stream that differ only in a few values: most do, and building a model for each costs ten times as
much.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode
"""The JSON of a value, as models write it."""


def make_text_mark() -> str:
    """Makes a text that occurs nowhere else."""
    return secrets.token_hex(16)


def make_number_mark() -> int:
    """Makes a number that occurs nowhere else."""
    return 10**20 + secrets.randbelow(10**20)


class SseEventTemplate:
    """An encoded event with placeholders for a few values.

    Args:
        event: its bytes, with marks in place of values.
        marks: the bytes of each value's mark; it may occur several times, or not at all.
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
        """Returns the event with ``values``, one for each mark."""
        return self._format % (values if self._pick is None else self._pick(values))


def _find_mark(event: bytes, one: bytes) -> list[int]:
    found, at = [], event.find(one)
    while at >= 0:
        found.append(at)
        at = event.find(one, at + len(one))
    return found
