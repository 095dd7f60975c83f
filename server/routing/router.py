"""Chooses a replica for each request: the one where its first token comes soonest, as far as can be predicted.

The score of a replica is the predicted wait there, plus what is left to prefill, plus the pictures left to encode, in
seconds. So a prefix that many want spreads by itself: once its holder is busy for longer than the prefix takes to
compute again, another replica wins, and holds it too. Where others are idle it spreads sooner (``rents``), or a large
fleet would crowd around the few replicas that came first. A decision looks at a bounded number of replicas.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from trencadis.server.routing.costs import StepCosts
from trencadis.server.routing.index import HolderIndex
from trencadis.server.routing.load import LINE, SPARE, Assignment, ReplicaLoad, uncrowded
from trencadis.server.routing.rents import Rents
from trencadis.server.routing.work import Demand, Key

DRAWN = 8
"""Replicas that are drawn at random for each decision."""

HOLDERS = 8
"""Holders of a prefix that are looked at."""

PICTURES, PICTURE_HOLDERS = 4, 4
"""Pictures of a request whose holders are looked at, and holders of each."""

UNKNOWN = -1
"""Instead of the tokens that a replica holds."""

WORK = 1.5
"""Weight of a request's own seconds beside those of the wait: what is computed twice also delays later requests."""

COPY = 2.0
"""Weight of what a copy takes beside the seconds that were waited for want of it."""

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
        self._lines = array("d", bytes(8 * LINE * replicas))
        self.loads = [ReplicaLoad(costs(i), rows, room, self._lines, LINE * i) for i in range(replicas)]
        self._costs = [load.costs for load in self.loads]
        self.prefixes = HolderIndex(bound // replicas)
        self.pictures = HolderIndex(bound // replicas // 4)
        self.rents = Rents()
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
        self.examined = 0
        candidates = {pinned: UNKNOWN} if pinned >= 0 else self._candidates(work, now, avoid)
        self.examined += len(candidates)
        lines, tokens, opened = self._lines, work.tokens, self._is_open
        best, held, least, first = -1, 0, math.inf, 0.0
        idle, there, shortest = -1, UNKNOWN, math.inf
        for replica, known in candidates.items():
            if not opened[replica] or replica in avoid:
                continue
            wait = uncrowded(lines, LINE * replica, now)  # most of the time of a decision is in these three lines
            if tokens > lines[LINE * replica + SPARE]:
                wait += self.loads[replica].crowded(tokens)
            if wait < least:  # else it cannot win, whatever it holds
                if known < 0:
                    known = self._held(replica, work)
                score = wait + WORK * self._left(replica, work, known)
                if score < least:
                    best, held, least, first = replica, known, score, wait
            if wait < shortest:
                idle, there, shortest = replica, known, wait
        if best < 0:
            left = [] if pinned >= 0 else [r for r in self._open if r not in avoid]
            return self.send(left[int(self._random() * len(left))], work, now) if left else None
        if idle != best:
            if there < 0:
                there = self._held(idle, work)
            if self._copied(work, best, held, idle, there, first - shortest):
                best, held = idle, there
        return self.send(best, work, now, held)

    def _copied(self, work: Demand, best: int, held: int, idle: int, there: int, seconds: float) -> bool:
        """Whether ``idle``, which holds less than ``best`` and waits ``seconds`` less, is to compute the rest again."""
        if held:
            key = next(p.key for p in reversed(work.prefixes) if p.tokens == held)
        else:
            key = next((p.key for p in work.pictures if self.pictures.holds(best, p.key)), -1)
            if key < 0:
                return False  # it is only faster
        price = self._left(idle, work, there) - self._left(best, work, held)
        return self.rents.paid(key, seconds, COPY * price)

    def send(self, replica: int, work: Demand, now: float, held: int = UNKNOWN) -> Assignment:
        """Charges ``replica``, which holds the first ``held`` tokens of a request, and notes what it will hold."""
        if held < 0:
            held = self._held(replica, work)
        ticket = Assignment(replica, self._left(replica, work, held), work.tokens)
        self.loads[replica].charge(ticket, now)
        # The longest first, so that a start counts as used after what follows it: caches evict tails first.
        self.prefixes.used(replica, [p.key for p in reversed(work.prefixes)])
        if work.pictures:
            # A picture within the cached prefix is neither looked up nor encoded.
            self.pictures.used(replica, [p.key for p in work.pictures if p.end > held])
        return ticket

    def began(self, ticket: Assignment, now: float) -> None:
        """The first token of a request came."""
        self.loads[ticket.replica].began(ticket, now)

    def ended(self, ticket: Assignment, now: float) -> None:
        """A request has ended, however it did; to be called exactly once."""
        self.loads[ticket.replica].ended(ticket, now)

    def _candidates(self, work: Demand, now: float, avoid: Collection[int]) -> Mapping[int, int]:
        """Replicas, and the tokens that each is known to hold; holders come first, so that they win ties.

        All open ones where those are few; else holders, and of a draw the one with the shortest wait, since it is not
        known what those hold.
        """
        count, draw = len(self._open), self._random
        if count <= DRAWN + HOLDERS:
            start = int(draw() * max(count, 1))
            return dict.fromkeys([*self._open[start:], *self._open[:start]], UNKNOWN)
        found: dict[int, int] = {}
        longest = seen = 0
        for key, tokens in reversed(work.prefixes):
            holders = self.prefixes.holders(key)
            if len(holders) != seen:  # else they are those of the longer one
                longest, seen = longest or tokens, len(holders)
                # Whoever is not found yet holds no longer prefix: each longer one's holders were all taken.
                if self._sample(holders, HOLDERS - len(found), found, tokens):
                    break
        for picture in work.pictures[:PICTURES]:
            if picture.end > longest:
                self._sample(self.pictures.holders(picture.key), PICTURE_HOLDERS, found, UNKNOWN)
        self.examined += DRAWN
        drawn, shortest = -1, math.inf
        opened, lines, tokens = self._open, self._lines, work.tokens
        for _ in range(DRAWN):
            replica = opened[int(draw() * count)]
            if replica in avoid:
                continue
            wait = uncrowded(lines, LINE * replica, now)
            if tokens > lines[LINE * replica + SPARE]:
                wait += self.loads[replica].crowded(tokens)
            if wait < shortest:
                drawn, shortest = replica, wait
        if drawn >= 0:
            found.setdefault(drawn, UNKNOWN)
        return found

    def _sample(self, holders: Sequence[int], most: int, found: dict[int, int], tokens: int) -> bool:
        """Adds at most ``most`` of ``holders``, from a place drawn at random on; whether there is no room for more."""
        count = len(holders)
        if count <= most:
            for holder in holders:
                found.setdefault(holder, tokens)
            return count == most
        start = int(self._random() * count)
        for i in range(start, start + most):
            found.setdefault(holders[i - count if i >= count else i], tokens)
        return True

    def _left(self, replica: int, work: Demand, held: int) -> float:
        """Seconds that ``replica`` needs for a request by itself: pictures, and tokens beyond the ``held`` ones."""
        costs = self._costs[replica]
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
