"""Bounds, tenants' limits and media uuids, counted by all API processes together.

The counters are in ``server/tenants/shared_table.py``.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trencadis.core.errors import Conflict
from trencadis.multimodal.images.processor_cache import UUID_CONFLICT, UuidRegistry, name_digest
from trencadis.server.tenants.admission import NAMES, Admission, Amounts, BodyBudget, Bounds
from trencadis.server.tenants.api_key_file import RATES, KeyFileError, Tenant
from trencadis.server.tenants.rate_limits import TenantAccount
from trencadis.server.tenants.shared_table import HELD, NAME_WORDS, UUID_BYTES, UUID_WAYS, SharedTable

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
