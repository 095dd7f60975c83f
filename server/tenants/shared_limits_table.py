"""Bounds, tenants' limits and media uuids, counted by all API processes together in memory that all of them map.

The counters are 64-bit words under one lock. The memory is an anonymous file (memfd), inherited by its descriptor: it
has no name that could be left behind. The lock is a record lock of that file, which the system releases when its holder
dies. A section takes some microseconds.

Each process writes what it holds into a column of its own, so that those of a dead process can be reset; what is spent
rather than held (rates of tenants, media uuids) is in shared rows.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from threading import RLock
from typing import Final

from trencadis.core.errors import Conflict
from trencadis.multimodal.media_uuids import UUID_CONFLICT, UuidRegistry, name_digest
from trencadis.server.tenants.server_admission_and_byte_budgets import NAMES, Admission, Amounts, BodyBudget, Bounds
from trencadis.server.tenants.tenant_registry import RATES, KeyFileError, Tenant, TenantAccount

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
``multimodal.media_uuids.ENTRIES``.
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


BODIES = HELD.index("bodies")
_ENTRY = struct.Struct("<24s32sq")


class SharedAdmission(Admission):
    """Counts admitted requests of all processes. A check and its charge in one section cannot exceed a bound."""

    def __init__(self, bounds: Bounds, table: SharedTable) -> None:
        super().__init__(bounds)
        self._table = table
        self.together = table
        self.bodies = SharedBodies(bounds.body_bytes, table)

    @property
    def inside(self) -> list[int]:
        """Amounts that tickets of all processes hold."""
        return [self._table.total(i) for i in range(len(NAMES))]

    @property
    def own(self) -> list[int]:
        """Amounts that tickets of this process hold."""
        return [self._table.get_own(i) for i in range(len(NAMES))]

    def take(self, wanted: Amounts) -> None:
        """See ``Admission``."""
        for i, more in enumerate(wanted):
            if more:
                self._table.add(i, more)

    def estimate_retry_after(self, which: int, excess: int) -> int:
        """See ``Admission``; assumes that the other processes release as much as this one."""
        return super().estimate_retry_after(which, -(-excess // self._table.count))


class SharedBodies(BodyBudget):
    """Counts the bytes of request bodies of all processes."""

    def __init__(self, bound: int, table: SharedTable) -> None:
        super().__init__(bound)
        self._table = table

    @property
    def inside(self) -> int:
        """Bytes of all bodies."""
        return self._table.total(BODIES)

    def add(self, count: int) -> None:
        """See ``BodyBudget``."""
        self._table.add(BODIES, count)


class SharedAccount(TenantAccount):
    """A tenant's account in its row of the table: each operation reads it, changes it and writes it back.

    The row holds what is spent and not what is left, so that processes may read a key file with a new rate at different
    times.

    Raises:
        KeyFileError: there are more tenants than rows of the table.
    """

    def __init__(self, tenant: Tenant, clock: Callable[[], float], table: SharedTable) -> None:
        try:
            self._table, self._at = table, table.find_tenant_row(tenant.name)
        except OverflowError as error:
            raise KeyFileError(f"--api-key-file: {error}; leave out --api-server-count.") from None
        super().__init__(tenant, clock)

    @contextmanager
    def _sync_with_table(self) -> Iterator[None]:
        table, base = self._table, self._at + NAME_WORDS
        with table:
            for i, name in enumerate(RATES):
                bucket, at = self.buckets.get(name), base + 2 * i
                if bucket is not None and table.reals[at + 1]:
                    bucket.left, bucket.at = bucket.rate - table.reals[at], table.reals[at + 1]
            before = self.inside = self._inside()
            try:
                yield
            finally:
                for i, name in enumerate(RATES):
                    bucket, at = self.buckets.get(name), base + 2 * i
                    if bucket is not None:
                        table.reals[at], table.reals[at + 1] = bucket.rate - bucket.left, bucket.at
                table.words[self._column] += self.inside - before

    @property
    def _column(self) -> int:
        return self._at + NAME_WORDS + 2 * len(RATES) + self._table.index

    def _inside(self) -> int:
        first = self._column - self._table.index
        return sum(self._table.words[first : first + self._table.count])

    @property
    def own(self) -> int:
        """Number of choices admitted by this process."""
        return self._table.words[self._column]

    def update_tenant(self, tenant: Tenant) -> None:
        """See ``TenantAccount``."""
        with self._sync_with_table():
            super().update_tenant(tenant)

    def enter(self, requests: int, more: bool = False) -> None:
        """See ``TenantAccount``."""
        with self._sync_with_table():
            super().enter(requests, more)

    def refund(self, name: str, count: float) -> None:
        """See ``TenantAccount``."""
        with self._sync_with_table():
            super().refund(name, count)

    def take(self, name: str, count: float, reserved: float = 0.0) -> None:
        """See ``TenantAccount``."""
        with self._sync_with_table():
            super().take(name, count, reserved)

    def give_back(self, name: str, reserved: float) -> None:
        """See ``TenantAccount``."""
        with self._sync_with_table():
            super().give_back(name, reserved)

    def spend(self, name: str, count: float) -> None:
        """See ``TenantAccount``."""
        with self._sync_with_table():
            super().spend(name, count)

    def leave(self, requests: int) -> None:
        """See ``TenantAccount``."""
        with self._sync_with_table():
            super().leave(requests)

    def make_headers(self) -> Iterator[tuple[str, str]]:
        """See ``TenantAccount``."""
        with self._sync_with_table():
            found = list(super().make_headers())
        return iter(found)


class SharedMediaUuids(UuidRegistry):
    """Media uuids that all processes share. In a set of 16 entries, the least recently used one is replaced."""

    def __init__(self, table: SharedTable, clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__()
        self._table, self._clock = table, clock

    def find(self, tenant: str, salt: str, uuid: str) -> str | None:
        """See ``UuidRegistry``."""
        name = name_digest(tenant, salt, uuid)
        with self._table:
            at, content = self._entry(name)
            if content is not None:
                self._write(at, name, content)
        return None if content is None else content.hex()

    def remember(self, tenant: str, salt: str, uuid: str, content: str) -> None:
        """See ``UuidRegistry``."""
        name, new = name_digest(tenant, salt, uuid), bytes.fromhex(content)
        with self._table:
            at, known = self._entry(name)
            if known is not None and known != new:
                raise Conflict(UUID_CONFLICT)
            self._write(at, name, new)

    def _entry(self, name: bytes) -> tuple[int, bytes | None]:
        """Returns the position of ``name`` and its content, or the position for a new entry and None."""
        first = self._table.find_uuid_set(name)
        oldest, stamp = first, 1 << 62
        for at in range(first, first + UUID_WAYS * UUID_BYTES, UUID_BYTES):
            known, content, used = _ENTRY.unpack_from(self._table.bytes, at)
            if known == name:
                return at, content
            if used < stamp:
                oldest, stamp = at, used
        return oldest, None

    def _write(self, at: int, name: bytes, content: bytes) -> None:
        """Writes an entry. A process that dies in between leaves no entry, rather than a name with another's
        content.
        """
        memory = self._table.bytes
        memory[at : at + len(name)] = bytes(len(name))
        _ENTRY.pack_into(memory, at, bytes(len(name)), content, self._clock())
        memory[at : at + len(name)] = name
