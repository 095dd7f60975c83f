"""Spreads the work of all connections over passes of the event loop: beginnings and ends of requests, and chunks.

Reading a head, checking its key and queueing its request takes half a millisecond, and a flood may bring thousands of
heads at once. So a few begin in one pass, and answers go on. Unread heads wait by tenant, which is found by the key
among their bytes in a hundredth of that time, and are served round-robin.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from trencadis.server.tenants.tenant_registry import MAX_KEYS, TenantRegistry

T = TypeVar("T")
MAX_SEARCHED = 16 << 10
"""Maximum bytes in which a key is searched."""
KEY = re.compile(rb"\r\n(?:x-api-key:|authorization:[ \t]*bearer[ \t])[ \t]*([^\r\n]*)", re.IGNORECASE)

log = logging.getLogger("trencadis.server")


HEADS = 32 << 20
"""Maximum bytes of unfinished request heads and of pipelined requests, on all connections together."""


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


class PacedCalls:
    """Runs calls in order, at most ``most`` of them in one pass; other callbacks run in between."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Schedules ``call`` for one of the next passes."""
        self._waiting.append(call)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._pass, loop)

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(self._most, len(self._waiting))):
            loop.call_soon(self._waiting.popleft())  # separately, so that an error in one does not stop the others
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            loop.call_soon(self._pass, loop)


STARTS_PER_PASS = 2
"""Maximum requests that begin in one pass of the event loop. Thousands of clients may write at once, and each head
delays all answers; further bytes wait for the next pass.
"""
ENDS_PER_PASS = 8
"""Maximum requests that end in one pass of the event loop because their clients have gone. Each takes a tenth of a
millisecond, and all those of a load balancer that ends go at once.
"""


class Resumable(Protocol):
    """A connection whose bytes may wait for another pass of the event loop."""

    def resume(self, data: bytes) -> None:
        """Takes bytes that came in an earlier pass; none: those that it has itself."""
        ...


@dataclass
class SharedLimits:
    """Limits that all connections of a server share.

    Args:
        seconds: in which the head of a request must arrive, from the connection or its first byte on; 0: no limit.
            Also the time for which a body is read and dropped after the answer.
        bound: most bytes of requests that have not begun.
        begun: requests that have begun in this pass of the event loop.
        deferred: connections with the bytes that wait for the next pass. Round-robin over tenants, and of one tenant
            alternately the one that waits longest and the one that came last, which may be another client's than a
            flood's.
        lost_connections: the ends of connections whose clients have gone.
        chunks: reads of chunked bodies, one in each pass.
        most_lines: lines of a head below the first one; a folded field has several.
        count_refusal: called with (status, reason) of each head that is refused before it is parsed.
    """

    seconds: float = 20.0
    bound: int = HEADS
    held: int = 0
    said: float = -60.0
    begun: int = 0
    deferred: PendingHeads[tuple[Resumable, bytes]] = field(default_factory=PendingHeads)
    lost_connections: PacedCalls = field(default_factory=lambda: PacedCalls(ENDS_PER_PASS))
    chunks: PacedCalls = field(default_factory=lambda: PacedCalls(1))
    most_lines: int = 256
    count_refusal: Callable[[int, str], None] = lambda status, reason: None

    def may_begin(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns True if another request may begin in this pass."""
        if not self.begun:
            loop.call_soon(self._run_pass, loop)
        self.begun += 1
        return self.begun <= STARTS_PER_PASS and not self.deferred

    def _run_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins the next requests, each separately, so that an error in one does not stop the others."""
        self.begun = 0
        if self.deferred:
            self._begin(loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        some = [self.deferred.take() for _ in range(min(len(self.deferred), STARTS_PER_PASS))]
        self.begun = len(some)
        for connection, data in some:
            loop.call_soon(connection.resume, data)
        loop.call_soon(self._run_pass, loop)

    def log_connection_limit(self) -> None:
        """Logs, at most once a minute, that the limit on bytes of pending heads is reached."""
        if time.monotonic() - self.said >= 60.0:
            self.said = time.monotonic()
            log.warning("unfinished request heads hold %d bytes: the server refuses more", self.bound)
