"""Turns before a request is read: tenants take them by weight, in the virtual time of ``--scheduling-policy fair``.

One event loop reads and prepares all requests, so a flood that is prepared as it comes delays every first token. A
request that waits here has sent its head and shown its key, and costs next to nothing more: nobody parses its body.
Two bounds make it wait. Few are prepared at a time, and one of those places is kept from a tenant that has the others.
And each tenant has only so many prepared as the engine may need before more are ready.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from trencadis.core.errors import Unavailable
from trencadis.core.scheduling.fairness import VirtualTime

PLACES = 4
"""Requests that the event loop prepares at a time, where no worker decodes their media."""
KEPT = 1
"""Places that no tenant takes alone."""
HOLD = 0.1
"""Seconds after which a preparation gives up its place: it waits for a client or a download, not for this process."""
PATIENCE = 5.0
"""Seconds for which a server that drains waits for a preparation, as for the last answers."""
PASSES = 16
"""Passes of the event loop in which a request that is prepared comes into the engine."""
AHEAD = 3
"""Requests of one tenant that have had their turn and whose answer has not begun, for each row of the engine: as many
may run and answer at their end, and twice as many wait in the engine."""
LEAST_AHEAD = 16


class TurnStage(Enum):
    """How far a request is."""

    WAITING = 1
    PREPARING = 2
    PREPARED = 3
    LEFT = 4


@dataclass(slots=True, eq=False)
class TenantTurn:
    """The turn of one request, which every holder may end more than once."""

    of: Turns
    tenant: str
    weight: float
    cost: float
    place: float
    number: int
    stage: TurnStage = TurnStage.WAITING
    since: float = 0.0
    """When its preparation began."""
    come: asyncio.Future[None] | None = None
    """Done when its turn has come; None if it did not wait."""

    @property
    def key(self) -> tuple[float, int]:
        """Its place in the order."""
        return self.place, self.number

    def prepared(self) -> None:
        """Gives its place to the next: it goes on without taking this process's time."""
        self.of.prepared(self)

    def leave(self) -> None:
        """Its answer begins, or there will be none."""
        self.of.left(self)

    def end(self, error: Exception) -> None:
        """Has its wait raise ``error``."""
        if self.come is not None and not self.come.done():
            self.come.set_exception(error)


class Turns:
    """Who waits, who is prepared, and who may be next. For one event loop.

    Args:
        places: requests that are prepared at a time.
        ahead: requests of one tenant between their turn and the begin of their answer.
    """

    def __init__(self, places: int = PLACES, ahead: int = LEAST_AHEAD, clock: Callable[[], float] = time.monotonic):
        self.waiting = 0
        self._places, self._each, self._ahead, self._clock = places, max(places - KEPT, 1), ahead, clock
        self._queues: dict[str, deque[TenantTurn]] = {}
        self._preparing: dict[TenantTurn, None] = {}
        """Those that hold a place, oldest first."""
        self._unready: dict[TenantTurn, None] = {}
        """Those that are not prepared, with a place or without."""
        self._held: Counter[str] = Counter()
        self._inside: Counter[str] = Counter()
        """By tenant: places that are held, and turns that have come and not ended."""
        self._time = VirtualTime()
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = ""

    @classmethod
    def over(cls, rows: int, workers: int) -> Turns:
        """Turns before engines of ``rows`` rows in all, and ``workers`` processes that decode media."""
        return cls(PLACES + workers, max(AHEAD * rows, LEAST_AHEAD))

    def enter(self, tenant: str, weight: float, cost: float) -> TenantTurn:
        """The turn of a request that has come. Where its stage is WAITING, ``come`` must be awaited before it goes on.

        Args:
            cost: of its preparation, in that of a small request.

        Raises:
            Unavailable: the server drains.
        """
        if self._closed:
            raise Unavailable(self._closed, retry_after=5)
        self._count += 1
        turn = TenantTurn(self, tenant, weight, cost, self._time.place(tenant, cost, weight), self._count)
        if tenant not in self._queues and self._room(tenant):
            self._begin(turn)
        else:
            turn.come = asyncio.get_running_loop().create_future()
            self._queues.setdefault(tenant, deque()).append(turn)
            self.waiting += 1
            self._watch()
        return turn

    def _room(self, tenant: str) -> bool:
        """Whether a request of ``tenant`` may be prepared now."""
        free = len(self._preparing) < self._places and self._held[tenant] < self._each
        return free and self._inside[tenant] < self._ahead

    def _begin(self, turn: TenantTurn) -> None:
        turn.stage, turn.since = TurnStage.PREPARING, self._clock()
        self._time.served(turn.place)
        self._preparing[turn] = self._unready[turn] = None
        self._held[turn.tenant] += 1
        self._inside[turn.tenant] += 1
        self._watch()

    def _next(self) -> None:
        """Begins the turns that may begin now."""
        while len(self._preparing) < self._places and self._queues:
            ready = [queue[0] for tenant, queue in self._queues.items() if self._room(tenant)]
            if not ready:
                return
            turn = min(ready, key=lambda one: one.key)
            self._unqueue(turn)
            self._begin(turn)
            if turn.come is not None and not turn.come.done():
                turn.come.set_result(None)

    def _unqueue(self, turn: TenantTurn) -> None:
        queue = self._queues[turn.tenant]
        queue.remove(turn)
        self.waiting -= 1
        if not queue:
            del self._queues[turn.tenant]

    def prepared(self, turn: TenantTurn) -> None:
        """See ``TenantTurn.prepared``."""
        self._unready.pop(turn, None)
        self._free(turn)

    def _free(self, turn: TenantTurn) -> None:
        """Gives the place of ``turn`` to the next."""
        if turn.stage is TurnStage.PREPARING:
            turn.stage = TurnStage.PREPARED
            del self._preparing[turn]
            self._less(self._held, turn.tenant)
            self._next()

    def left(self, turn: TenantTurn) -> None:
        """See ``TenantTurn.leave``."""
        self._unready.pop(turn, None)
        if turn.stage is TurnStage.WAITING:
            turn.stage = TurnStage.LEFT
            self._unqueue(turn)
            self._time.settle(turn.tenant, -turn.cost, turn.weight)
        elif turn.stage is not TurnStage.LEFT:
            self._less(self._inside, turn.tenant)
            if turn.stage is TurnStage.PREPARING:
                del self._preparing[turn]
                self._less(self._held, turn.tenant)
            turn.stage = TurnStage.LEFT
            self._time.forget()
            self._next()

    @staticmethod
    def _less(count: Counter[str], tenant: str) -> None:
        """One less; a tenant that has none is forgotten."""
        count[tenant] -= 1
        if not count[tenant]:
            del count[tenant]

    # --- places that are held for too long ---

    def _watch(self) -> None:
        """Looks again when the oldest preparation has had its time, if somebody waits for its place."""
        if self._timer is None and self.waiting and self._preparing:
            rest = next(iter(self._preparing)).since + HOLD - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(rest, 0.0), self._look)

    def _look(self) -> None:
        self._timer = None
        late = self._clock() - HOLD
        for turn in [t for t in self._preparing if t.since <= late]:
            self._free(turn)
        self._watch()

    # --- the end of the server ---

    async def close(self, seconds: float, poll: float = 0.02) -> int:
        """Takes no more requests, and waits until those that wait have had their turn and are in the engine, at most
        ``seconds``.

        Those that still wait then end with an error; returns how many.
        """
        self._closed = "The server is not accepting requests: draining."
        end = self._clock() + seconds
        while (self.waiting or self._busy()) and self._clock() < end:
            await asyncio.sleep(poll)
        left = self.waiting
        self.stop()
        for _ in range(PASSES):
            await asyncio.sleep(0)
        return left

    def _busy(self) -> bool:
        """Whether a request is prepared whose client or download is not late."""
        late = self._clock() - PATIENCE
        return any(turn.since > late for turn in self._unready)

    def stop(self) -> None:
        """Ends every wait with an error, now."""
        self._closed = self._closed or "The server is stopping; please retry."
        for turn in [turn for queue in self._queues.values() for turn in queue]:
            turn.end(Unavailable("The server is stopping; please retry.", retry_after=5))
