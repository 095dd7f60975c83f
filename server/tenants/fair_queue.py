"""The fair queue in front of request parsing: tenants are served by weight, in the virtual time of
``--scheduling-policy fair``.

One event loop reads and prepares all requests, so a flood that is prepared on arrival delays every first token. A
waiting request has sent its head and its key, and costs next to nothing more: its body is not parsed.
Two limits make it wait. Few requests are prepared at a time, and one of those slots is reserved, so that no tenant
holds all of them. And each tenant has only as many prepared requests as the engine may need before more are ready.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from trencadis.core.errors import Unavailable
from trencadis.core.scheduling.fair_order import VirtualTime

MAX_PREPARING = 4
"""Requests that the event loop prepares at a time if no worker decodes their media."""
RESERVED_SLOTS = 1
"""Number of slots that no single tenant may take."""
SLOT_TIMEOUT = 0.1
"""Seconds after which a request that is being prepared gives up its slot: it is waiting for a client or a download, not
for this process.
"""
DRAIN_TIMEOUT = 5.0
"""Seconds for which a draining server waits for a preparation, and for the last answers."""
DRAIN_LOOP_PASSES = 16
"""Passes of the event loop in which a prepared request reaches the engine."""
ADMITTED_PER_ROW = 3
"""Admitted requests of one tenant whose answer has not begun, for each row of the engine: as many
may run and answer at their end, and twice as many wait in the engine."""
MIN_ADMITTED = 16


class FairQueueStage(Enum):
    """The stages of a request in the queue."""

    WAITING = 1
    PREPARING = 2
    PREPARED = 3
    DONE = 4


@dataclass(slots=True, eq=False)
class FairQueueEntry:
    """The queue entry of one request. Ending it more than once does nothing."""

    queue: TenantFairQueue
    tenant: str
    weight: float
    cost: float
    virtual_time: float
    number: int
    stage: FairQueueStage = FairQueueStage.WAITING
    preparing_since: float = 0.0
    """Time at which its preparation began."""
    admitted: asyncio.Future[None] | None = None
    """Resolved when the request is admitted; None if it did not wait."""

    @property
    def order_key(self) -> tuple[float, int]:
        """The key by which entries are sorted."""
        return self.virtual_time, self.number

    def mark_prepared(self) -> None:
        """Releases its slot: the request no longer takes this process's time."""
        self.queue.mark_prepared(self)

    def finish(self) -> None:
        """Removes the request from the queue when its answer begins, or when it will get none."""
        self.queue.remove(self)

    def fail(self, error: Exception) -> None:
        """Makes its wait raise ``error``."""
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_exception(error)


class TenantFairQueue:
    """Fair queue of requests per tenant: decides which are prepared now and which wait. For one event loop.

    Args:
        slots: requests that are prepared at a time.
        max_admitted: most requests of one tenant between admission and the first byte of their answer.
    """

    def __init__(
        self, slots: int = MAX_PREPARING, max_admitted: int = MIN_ADMITTED, clock: Callable[[], float] = time.monotonic
    ):
        self.waiting = 0
        self._slots, self._slots_per_tenant, self._max_admitted, self._clock = (
            slots,
            max(slots - RESERVED_SLOTS, 1),
            max_admitted,
            clock,
        )
        self._queues: dict[str, deque[FairQueueEntry]] = {}
        self._preparing: dict[FairQueueEntry, None] = {}
        """Entries that hold a slot, oldest first."""
        self._unprepared: dict[FairQueueEntry, None] = {}
        """Entries that are not prepared yet, with a slot or without."""
        self._slots_held: Counter[str] = Counter()
        self._admitted: Counter[str] = Counter()
        """By tenant: requests that were admitted and have not ended; ``_slots_held`` counts slots."""
        self._virtual_clock = VirtualTime()
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = ""

    @classmethod
    def for_engines(cls, rows: int, workers: int) -> TenantFairQueue:
        """Makes the queue for engines of ``rows`` rows in all, and ``workers`` processes that decode media."""
        return cls(MAX_PREPARING + workers, max(ADMITTED_PER_ROW * rows, MIN_ADMITTED))

    def enter(self, tenant: str, weight: float, cost: float) -> FairQueueEntry:
        """Queues a request that has arrived. If its stage is WAITING, its ``admitted`` must be awaited before it goes
        on.

        Args:
            cost: cost of its preparation relative to a small request.

        Raises:
            Unavailable: the server is draining.
        """
        if self._closed:
            raise Unavailable(self._closed, retry_after=5)
        self._count += 1
        entry = FairQueueEntry(
            self, tenant, weight, cost, self._virtual_clock.schedule_service(tenant, cost, weight), self._count
        )
        if tenant not in self._queues and self._may_prepare(tenant):
            self._start_preparing(entry)
        else:
            entry.admitted = asyncio.get_running_loop().create_future()
            self._queues.setdefault(tenant, deque()).append(entry)
            self.waiting += 1
            self._arm_timer()
        return entry

    def _may_prepare(self, tenant: str) -> bool:
        """Returns True if a request of ``tenant`` may be prepared now."""
        free = len(self._preparing) < self._slots and self._slots_held[tenant] < self._slots_per_tenant
        return free and self._admitted[tenant] < self._max_admitted

    def _start_preparing(self, entry: FairQueueEntry) -> None:
        entry.stage, entry.preparing_since = FairQueueStage.PREPARING, self._clock()
        self._virtual_clock.advance_to(entry.virtual_time)
        self._preparing[entry] = self._unprepared[entry] = None
        self._slots_held[entry.tenant] += 1
        self._admitted[entry.tenant] += 1
        self._arm_timer()

    def _admit_next(self) -> None:
        """Admits the requests that may be prepared now."""
        while len(self._preparing) < self._slots and self._queues:
            ready = [queue[0] for tenant, queue in self._queues.items() if self._may_prepare(tenant)]
            if not ready:
                return
            entry = min(ready, key=lambda one: one.order_key)
            self._unqueue(entry)
            self._start_preparing(entry)
            if entry.admitted is not None and not entry.admitted.done():
                entry.admitted.set_result(None)

    def _unqueue(self, entry: FairQueueEntry) -> None:
        queue = self._queues[entry.tenant]
        queue.remove(entry)
        self.waiting -= 1
        if not queue:
            del self._queues[entry.tenant]

    def mark_prepared(self, entry: FairQueueEntry) -> None:
        """See ``FairQueueEntry.mark_prepared``."""
        self._unprepared.pop(entry, None)
        self._release_slot(entry)

    def _release_slot(self, entry: FairQueueEntry) -> None:
        """Releases the slot of ``entry`` and admits the next request."""
        if entry.stage is FairQueueStage.PREPARING:
            entry.stage = FairQueueStage.PREPARED
            del self._preparing[entry]
            self._decrement(self._slots_held, entry.tenant)
            self._admit_next()

    def remove(self, entry: FairQueueEntry) -> None:
        """See ``FairQueueEntry.finish``."""
        self._unprepared.pop(entry, None)
        if entry.stage is FairQueueStage.WAITING:
            entry.stage = FairQueueStage.DONE
            self._unqueue(entry)
            self._virtual_clock.settle(entry.tenant, -entry.cost, entry.weight)
        elif entry.stage is not FairQueueStage.DONE:
            self._decrement(self._admitted, entry.tenant)
            if entry.stage is FairQueueStage.PREPARING:
                del self._preparing[entry]
                self._decrement(self._slots_held, entry.tenant)
            entry.stage = FairQueueStage.DONE
            self._virtual_clock.forget()
            self._admit_next()

    @staticmethod
    def _decrement(count: Counter[str], tenant: str) -> None:
        """Subtracts one; a tenant at zero is removed."""
        count[tenant] -= 1
        if not count[tenant]:
            del count[tenant]

    # --- slots that are held for too long ---

    def _arm_timer(self) -> None:
        """Starts a timer for the oldest preparation if requests wait for its slot."""
        if self._timer is None and self.waiting and self._preparing:
            rest = next(iter(self._preparing)).preparing_since + SLOT_TIMEOUT - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(rest, 0.0), self._release_overdue_slots)

    def _release_overdue_slots(self) -> None:
        self._timer = None
        late = self._clock() - SLOT_TIMEOUT
        for entry in [t for t in self._preparing if t.preparing_since <= late]:
            self._release_slot(entry)
        self._arm_timer()

    # --- the end of the server ---

    async def close(self, seconds: float, poll: float = 0.02) -> int:
        """Refuses new requests, and waits until the queued requests have been admitted and are in the engine, at most
        ``seconds``.

        Requests that still wait then end with an error; returns their number.
        """
        self._closed = "The server is not accepting requests: draining."
        end = self._clock() + seconds
        while (self.waiting or self._has_unprepared()) and self._clock() < end:
            await asyncio.sleep(poll)
        left = self.waiting
        self.stop()
        for _ in range(DRAIN_LOOP_PASSES):
            await asyncio.sleep(0)
        return left

    def _has_unprepared(self) -> bool:
        """True while a request is being prepared that is not overdue."""
        late = self._clock() - DRAIN_TIMEOUT
        return any(entry.preparing_since > late for entry in self._unprepared)

    def stop(self) -> None:
        """Ends every wait with an error, now."""
        self._closed = self._closed or "The server is stopping; please retry."
        for entry in [entry for queue in self._queues.values() for entry in queue]:
            entry.fail(Unavailable("The server is stopping; please retry.", retry_after=5))
