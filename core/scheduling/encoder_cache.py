"""The encoder cache: assigns rows of the image arena to images. Pure Python.

An image is *pinned* while a sequence that holds KV blocks still has tokens of it to compute. Otherwise it is *idle*,
and its rows may be reused, the least recently used image first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from trencadis.core.kv.block_pool import EvictionLog
from trencadis.core.media_spans import RESERVED_ROWS, TokenRun
from trencadis.core.step import Int32


def rows_of_run(run: TokenRun, rows: Int32) -> Int32:
    """Returns the arena rows, int32 [run.length], of a run's tokens; ``rows`` are those of its item."""
    constant = RESERVED_ROWS + run.constant
    return np.full(run.length, constant, np.int32) if run.constant >= 0 else rows[run.first : run.first + run.length]


@dataclass(slots=True)
class EncoderCacheEntry:
    """One encoded image: its rows in token order and the keys of the sequences that pin it."""

    rows: Int32
    pins: set[int] = field(default_factory=set)


class EncoderCache:
    """Allocates rows [reserved, rows) of the arena; rows 0 (ZERO), 1 (SINK) and constant rows are never allocated."""

    def __init__(self, rows: int, reserved: int = RESERVED_ROWS) -> None:
        self.capacity = max(rows - reserved, 0)
        self._reserved = reserved
        self._free = list(range(rows - 1, reserved - 1, -1))
        self._entries: OrderedDict[str, EncoderCacheEntry] = OrderedDict()
        self.evictions = 0
        self.log: EvictionLog | None = None

    @property
    def used(self) -> int:
        """Number of rows that hold an image."""
        return self.capacity - len(self._free)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def pin(self, key: str, owner: int) -> Int32 | None:
        """Pins the image ``key`` for a sequence; returns its rows int32 [tokens], or None if it is not resident."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.pins.add(owner)
        return entry.rows

    def unpin(self, key: str, owner: int) -> None:
        """Removes a pin, if there is one."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.pins.discard(owner)

    def unpin_all(self, owner: int) -> None:
        """Removes all pins of a sequence."""
        for entry in self._entries.values():
            entry.pins.discard(owner)

    def fits(self, rows: int, kept: Set[str] = frozenset()) -> bool:
        """Returns True if ``put`` of that many rows would succeed."""
        return rows <= len(self._free) or self._would_fit(rows, kept)

    def _would_fit(self, rows: int, kept: Set[str]) -> bool:
        """Returns True if the rows would fit after idle images not in ``kept`` are evicted."""
        idle = (len(e.rows) for k, e in self._entries.items() if not e.pins and k not in kept)
        return rows <= len(self._free) + sum(idle)

    def put(self, key: str, rows: int, owner: int, kept: Set[str] = frozenset()) -> Int32 | None:
        """Allocates rows int32 [rows] for a new image, pinned for a sequence; evicts idle images not in ``kept``.

        Returns None and evicts nothing if there are not enough rows.
        """
        assert key not in self._entries
        if not self.fits(rows, kept):
            return None
        while len(self._free) < rows:
            self._evict(kept)
        taken = np.array([self._free.pop() for _ in range(rows)], np.int32)
        self._entries[key] = EncoderCacheEntry(taken, {owner})
        return taken

    def _evict(self, kept: Set[str] = frozenset()) -> None:
        key = next(k for k, e in self._entries.items() if not e.pins and k not in kept)
        self._free.extend(reversed(self._entries.pop(key).rows.tolist()))
        self.evictions += 1
        if self.log is not None:
            self.log.image(key)

    def empty(self) -> None:
        """Evicts every idle image."""
        for _ in range(sum(not e.pins for e in self._entries.values())):
            self._evict()

    def check(self) -> None:
        """Asserts that every row is free or in exactly one entry."""
        rows = list(self._free)
        for entry in self._entries.values():
            rows.extend(entry.rows.tolist())
        assert sorted(rows) == list(range(self._reserved, self.capacity + self._reserved)), "arena rows leaked"
