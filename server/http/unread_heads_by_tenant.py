"""Request heads that are not parsed yet, served round-robin by tenant, which is found by the key among a head's bytes.

Finding a key takes a hundredth of the half millisecond in which a head is parsed, checked and queued, so that requests
of other tenants need not wait for a flood of heads.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trencadis.server.tenants.tenant_registry import MAX_KEYS, TenantRegistry

T = TypeVar("T")
MAX_SEARCHED = 16 << 10
"""Maximum bytes in which a key is searched."""
KEY = re.compile(rb"\r\n(?:x-api-key:|authorization:[ \t]*bearer[ \t])[ \t]*([^\r\n]*)", re.IGNORECASE)


def find_keys(data: bytes) -> list[bytes]:
    """Extracts the first ``MAX_KEYS`` API keys in an unparsed HTTP head; they are not verified."""
    end = data.find(b"\r\n\r\n", 0, MAX_SEARCHED)
    found = KEY.finditer(data, 0, end if end >= 0 else MAX_SEARCHED)
    return [one[1].rstrip() for one in itertools.islice(found, MAX_KEYS)]


def find_tenant_name(tenants: TenantRegistry, data: bytes) -> str:
    """Returns the name of the tenant whose key is in an unparsed HTTP head; "" without a valid key."""
    account = tenants.find(find_keys(data))
    return "" if account is None else account.tenant.name


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    """Waiting items of one tenant; ``next`` alternates between the oldest and the newest."""

    some: deque[T] = field(default_factory=deque)
    newest: bool = False

    def next(self) -> T:
        self.newest = not self.newest
        return self.some.popleft() if self.newest else self.some.pop()


class PendingHeads(Generic[T]):
    """Waiting items by tenant name from ``get_tenant``; a single name without it."""

    def __init__(self) -> None:
        self.get_tenant: Callable[[bytes], str] = lambda data: ""
        self._queues: dict[str, _TenantQueue[T]] = {}
        """Queues in round-robin order."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, one: T, data: bytes) -> None:
        """Adds ``one``, whose head begins with ``data``."""
        self._queues.setdefault(self.get_tenant(data), _TenantQueue()).some.append(one)
        self._count += 1

    def take(self) -> T:
        """Removes and returns the next one in round-robin order."""
        name = next(iter(self._queues))
        line = self._queues.pop(name)
        one = line.next()
        if line.some:
            self._queues[name] = line
        self._count -= 1
        return one
