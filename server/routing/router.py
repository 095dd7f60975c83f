"""Chooses a replica for each request: the one where its first token comes soonest, as far as can be predicted.

The score of a replica is the predicted wait there, plus what is left to prefill, plus the pictures left to encode, in
seconds. So a prefix that many want spreads by itself: once its holder is busy for longer than the prefix takes to
compute again, another replica wins, and holds it too. A decision looks at a bounded number of replicas.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence

from trencadis.server.routing.costs import StepCosts
from trencadis.server.routing.index import HolderIndex
from trencadis.server.routing.load import Assignment, ReplicaLoad
from trencadis.server.routing.work import Demand, Key

DRAWN = 8
"""Replicas that are drawn at random for each decision."""

HOLDERS = 8
"""Holders of a prefix that are looked at."""

PICTURES, PICTURE_HOLDERS = 4, 4
"""Pictures of a request whose holders are looked at, and holders of each."""

WORK = 1.5
"""Weight of a request's own seconds beside those of the wait: what is computed twice also delays later requests."""

BOUND = 1 << 21
"""Pairs of a prefix and a holder that the index keeps, of all replicas together."""


class Router:
    """The replicas' loads and what they hold.

    Args:
        replicas: how many there may be; their numbers are [0, replicas).
        costs: makes what replica i's steps cost; what it gives is kept, and may be taught further.
        rows: requests that a replica runs at a time; 0: any number.
        room: tokens of a replica's KV cache; 0: unknown.
        bound: pairs of a prefix and a holder in the index, of all replicas together.
        seed: of the draws.
    """

    def __init__(
        self,
        replicas: int,
        costs: Callable[[int], StepCosts] = lambda i: StepCosts(),
        rows: int = 0,
        room: int = 0,
        bound: int = BOUND,
        seed: int = 0,
    ) -> None:
        self.loads = [ReplicaLoad(costs(i), rows, room) for i in range(replicas)]
        self.prefixes = HolderIndex(bound // replicas)
        self.pictures = HolderIndex(bound // replicas // 4)
        self.examined = 0
        """Replicas that the last decision scored."""
        self._open: list[int] = []
        self._is_open = [False] * replicas
        self._random = random.Random(seed).random

    def open(self, replica: int) -> None:
        """``replica`` takes requests."""
        if not self._is_open[replica]:
            self._is_open[replica] = True
            self._open.append(replica)

    def close(self, replica: int) -> None:
        """``replica`` takes no requests; what it holds stays known."""
        if self._is_open[replica]:
            self._is_open[replica] = False
            self._open.remove(replica)

    def lost(self, replica: int) -> None:
        """``replica``'s engine ended: it takes no requests and holds nothing."""
        self.close(replica)
        self.prefixes.forget(replica)
        self.pictures.forget(replica)

    def evicted(self, replica: int, prefixes: Iterable[Key], pictures: Iterable[Key] = ()) -> None:
        """``replica`` reports what it evicted."""
        self.prefixes.evicted(replica, prefixes)
        self.pictures.evicted(replica, pictures)

    def choose(self, work: Demand, now: float, avoid: Collection[int] = (), pinned: int = -1) -> Assignment | None:
        """The replica for a request, charged with it at once; None where none is open.

        Args:
            now: seconds of the caller's clock, which must be the same for all calls.
            avoid: replicas that are not to be chosen.
            pinned: the only replica that may be chosen; -1: any.
        """
        candidates: Sequence[int] = [pinned] if pinned >= 0 else self._candidates(work)
        best, least, examined = -1, 0.0, 0
        for replica in candidates:
            if not self._is_open[replica] or replica in avoid:
                continue
            examined += 1
            score = self.loads[replica].wait(now, work.tokens)
            if best >= 0 and score >= least:
                continue  # whatever it holds
            score += WORK * self._left(replica, work, self._held(replica, work))
            if best < 0 or score < least:
                best, least = replica, score
        if best < 0 and pinned < 0 and (left := [r for r in self._open if r not in avoid]):
            best = left[int(self._random() * len(left))]
        self.examined = examined
        return None if best < 0 else self.send(best, work, now)

    def send(self, replica: int, work: Demand, now: float) -> Assignment:
        """Charges ``replica`` with a request, and notes what it will hold."""
        held = self._held(replica, work)
        ticket = Assignment(replica, self._left(replica, work, held), work.tokens)
        self.loads[replica].charge(ticket, now)
        # The longest first, so that a start counts as used after what follows it: caches evict tails first.
        self.prefixes.used(replica, (p.key for p in reversed(work.prefixes)))
        if work.pictures:
            # A picture within the cached prefix is neither looked up nor encoded.
            self.pictures.used(replica, (p.key for p in work.pictures if p.end > held))
        return ticket

    def began(self, ticket: Assignment, now: float) -> None:
        """The first token of a request came."""
        self.loads[ticket.replica].began(ticket, now)

    def ended(self, ticket: Assignment, now: float) -> None:
        """A request has ended, however it did; to be called exactly once."""
        self.loads[ticket.replica].ended(ticket, now)

    def _candidates(self, work: Demand) -> Sequence[int]:
        """All open replicas where those are few, else holders and a draw; holders come first, so that they win ties."""
        if len(self._open) <= DRAWN + HOLDERS:
            start = int(self._random() * max(len(self._open), 1))
            return [*self._open[start:], *self._open[:start]]
        found: dict[int, None] = {}
        for prefix in reversed(work.prefixes):
            holders = self.prefixes.holders(prefix.key)
            if holders:
                self._sample(holders, HOLDERS - len(found), found)
                if len(found) >= HOLDERS:
                    break
        for picture in work.pictures[:PICTURES]:
            self._sample(self.pictures.holders(picture.key), PICTURE_HOLDERS, found)
        count = len(self._open)
        for _ in range(DRAWN):
            found[self._open[int(self._random() * count)]] = None
        return list(found)

    def _sample(self, holders: Sequence[int], most: int, found: dict[int, None]) -> None:
        """Adds at most ``most`` of ``holders``, from a place drawn at random on."""
        count = len(holders)
        if count <= most:
            found.update(dict.fromkeys(holders))
            return
        start = int(self._random() * count)
        for i in range(most):
            found[holders[(start + i) % count]] = None

    def _left(self, replica: int, work: Demand, held: int) -> float:
        """Seconds that ``replica`` needs for a request by itself: pictures, and tokens beyond the ``held`` ones."""
        costs = self.loads[replica].costs
        seconds = costs.token * (work.tokens - held)
        for picture in work.pictures:
            if picture.end > held and not self.pictures.holds(replica, picture.key):
                seconds += costs.slot * picture.slots
        return seconds

    def _held(self, replica: int, work: Demand) -> int:
        """Tokens of the longest prefix that ``replica`` holds, bisected: who holds a prefix holds its starts."""
        prefixes = work.prefixes
        if not prefixes or not self.prefixes.holds(replica, prefixes[0].key):
            return 0
        low, high = 1, len(prefixes)
        while low < high:
            middle = (low + high) // 2
            if self.prefixes.holds(replica, prefixes[middle].key):
                low = middle + 1
            else:
                high = middle
        return prefixes[low - 1].tokens
