"""Shared counters of API processes: 64-bit words in memory that all of them map, under one lock.

The memory is an anonymous file (memfd), inherited by its descriptor: it has no name that could be left behind. The lock
is a record lock of that file, which the system releases when its holder dies. A section takes some microseconds.

Each process writes what it holds into a column of its own, so that those of a dead process can be reset; what is spent
rather than held (rates of tenants, media uuids) is in shared rows.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from hashlib import blake2b
from threading import RLock
from typing import Final

HELD: Final = ("requests", "tokens", "pixels", "bodies", "connections", "turns")
"""Names of the counters that a process holds, word by word of its column."""
RATES_EACH: Final = 3
NAME_WORDS: Final = 2
TENANT_ROWS: Final = 1 << 15
"""Slots for tenants; a quarter stays empty, so that searches are short."""
MAX_TENANTS: Final = TENANT_ROWS * 3 // 4
UUID_SETS: Final = 1 << 12
UUID_WAYS: Final = 16
"""Entries per set of media uuids; the least recently used one is replaced. In total as many as
``multimodal.images.processor_cache.ENTRIES``.
"""
UUID_BYTES: Final = 64
"""Bytes of an entry: name (24), content (32), time of last use (8)."""


class SharedTable:
    """The table of process ``index`` of ``count``; the front process has index ``count``, and no column.

    A ``with`` block excludes all other processes; threads of this process are serialised by a lock.
    """

    def __init__(self, descriptor: int, count: int, index: int) -> None:
        self.descriptor, self.count, self.index = descriptor, count, index
        self._memory = mmap.mmap(descriptor, table_bytes(count))
        self.words = memoryview(self._memory).cast("q")
        self.reals = memoryview(self._memory).cast("d")
        self.bytes = memoryview(self._memory)
        self._thread_lock = RLock()
        self._depth = 0

    @classmethod
    def create(cls, count: int) -> SharedTable:
        """Creates a table of zeros; its descriptor can be inherited."""
        descriptor = os.memfd_create("trencadis-api", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, table_bytes(count))
        return cls(descriptor, count, count)

    def __enter__(self) -> SharedTable:
        self._thread_lock.acquire()
        if not self._depth:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)
        self._thread_lock.release()

    # --- what is held ---

    def total(self, which: int) -> int:
        """Returns the sum of ``HELD[which]`` over all processes."""
        step = len(HELD)
        return sum(self.words[which : step * self.count : step])

    def get_own(self, which: int) -> int:
        """Returns ``HELD[which]`` of this process."""
        return self.words[self.index * len(HELD) + which]

    def put(self, which: int, value: int) -> None:
        """Sets ``HELD[which]`` of this process."""
        self.words[self.index * len(HELD) + which] = value

    def add(self, which: int, more: int) -> None:
        """Adds to ``HELD[which]`` of this process."""
        self.words[self.index * len(HELD) + which] += more

    def clear_process(self, index: int) -> None:
        """Zeroes what process ``index`` held; called after the process has ended."""
        with self:
            for which in range(len(HELD)):
                self.words[index * len(HELD) + which] = 0
            for at in self.list_tenant_rows():
                self.words[at + NAME_WORDS + 2 * RATES_EACH + index] = 0

    # --- tenants ---

    @property
    def _tenants(self) -> int:
        """Index of the first word of the tenants' rows."""
        return self.count * len(HELD) + 1

    def list_tenant_rows(self) -> list[int]:
        """Returns the first words of the rows in use."""
        width, first = count_row_words(self.count), self._tenants
        used = self.words[first - 1]
        found: list[int] = []
        for at in range(first, first + TENANT_ROWS * width, width):
            if len(found) == used:
                break
            if self.words[at] or self.words[at + 1]:
                found.append(at)
        return found

    def find_tenant_row(self, name: str) -> int:
        """Returns the first word of the row of tenant ``name``, which is created if missing.

        Raises:
            OverflowError: there are too many tenants.
        """
        key = blake2b(name.encode(), digest_size=16).digest()
        one, two = (int.from_bytes(key[i : i + 8], "little", signed=True) or 1 for i in (0, 8))
        width, slot = count_row_words(self.count), one % TENANT_ROWS
        with self:
            while True:
                at = self._tenants + slot * width
                if self.words[at] == one and self.words[at + 1] == two:
                    return at
                if not self.words[at] and not self.words[at + 1]:
                    break
                slot = (slot + 1) % TENANT_ROWS
            if self.words[self._tenants - 1] >= MAX_TENANTS:
                raise OverflowError(f"several API processes know at most {MAX_TENANTS} tenants")
            self.words[at], self.words[at + 1] = one, two
            self.words[self._tenants - 1] += 1
            return at

    # --- names of media ---

    def find_uuid_set(self, name: bytes) -> int:
        """Returns the first byte of the set of entries that ``name`` belongs to."""
        base = 8 * (self._tenants + TENANT_ROWS * count_row_words(self.count))
        return base + int.from_bytes(name[:4], "little") % UUID_SETS * UUID_WAYS * UUID_BYTES


def count_row_words(count: int) -> int:
    """Returns the words of a tenant's row: name, spent amount and time per rate, admitted choices by process."""
    return NAME_WORDS + 2 * RATES_EACH + count


def table_bytes(count: int) -> int:
    """Returns the bytes of the table of ``count`` processes; pages that are never used take no memory."""
    words = count * len(HELD) + 1 + TENANT_ROWS * count_row_words(count)
    return 8 * words + UUID_SETS * UUID_WAYS * UUID_BYTES
