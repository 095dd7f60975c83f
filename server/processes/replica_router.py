"""Chooses a replica for each request: the one with the earliest predicted first token.

The score of a replica is the predicted wait there, plus the tokens left to prefill, plus the images left to encode, in
seconds. So a prefix that many requests share spreads by itself: once its holder is busy for longer than the prefix
takes to compute again, another replica wins, and holds it too. If others are idle it spreads sooner
(``replication_policy``), or a large fleet would crowd around the few replicas that came first. A decision looks at a
bounded number of replicas.

Index of the replicas that hold each content, as far as the router knows. Bounded; the least recently used goes
first.

Decides when a prefix that some replicas hold is copied to one more replica (ski-rental rule).

Ski-rental rule: a prefix is copied to another replica once waiting for it has cost as much as recomputing it. A request
that waits longer at a holder than it would elsewhere adds the difference to the content's account; once the account
reaches the cost of computing the content again, the next request goes elsewhere and computes it. So copies follow the
demand without a known request rate, and waits and copies together cost at most twice what the best choice in hindsight
would.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from trencadis.server.processes.replica_wait_prediction import (
    LINE_WORDS,
    SPARE,
    Assignment,
    Key,
    ReplicaLoad,
    RequestCost,
    StepCosts,
    predict_wait,
)

MAX_TRACKED = 1 << 14
"""Most tracked contents; the one that was waited for longest ago is dropped first."""


class ReplicationPolicy:
    """Decides when content is worth recomputing on another replica. Sums, per content, the extra seconds that
    requests have waited for it since its last copy.
    """

    def __init__(self, bound: int = MAX_TRACKED) -> None:
        self.bound = max(bound, 1)
        self._waited: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        """Number of tracked contents."""
        return len(self._waited)

    def should_replicate(self, key: Key, seconds: float, price: float) -> bool:
        """Adds ``seconds`` of extra waiting to ``key``; True, and the sum is reset, once it reaches ``price``, the
        cost of a copy in seconds.
        """
        total = self._waited.pop(key, 0.0) + seconds
        if total >= price:
            return True
        self._waited[key] = total
        if len(self._waited) > self.bound:
            self._waited.popitem(last=False)
        return False


class CacheIndex:
    """Maps keys of cached content to the replicas that hold them.

    Each replica has a list of its own in the order of use, at most ``bound`` long. A cache evicts in about that order,
    so the list is right for most keys even if no engine reports evictions.
    """

    def __init__(self, bound: int) -> None:
        self.bound = max(bound, 1)
        self._holders: dict[Key, list[int]] = {}
        self._held: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        """Number of pairs of a key and a holder."""
        return sum(len(held) for held in self._held.values())

    def get_holders(self, key: Key) -> Sequence[int]:
        """Returns the replicas that hold ``key``; the result must not be changed."""
        return self._holders.get(key, ())

    def holds(self, replica: int, key: Key) -> bool:
        """Returns True if ``replica`` holds ``key``."""
        held = self._held.get(replica)
        return held is not None and key in held

    def mark_used(self, replica: int, keys: Iterable[Key]) -> None:
        """Records that ``replica`` holds ``keys`` (or will, once it has run the request); the last key becomes the
        most recent.
        """
        held = self._held.get(replica)
        if held is None:
            held = self._held[replica] = OrderedDict()
        for key in keys:
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
                self._holders.setdefault(key, []).append(replica)
        while len(held) > self.bound:
            self._remove_holder(replica, held.popitem(last=False)[0])

    def remove_evicted(self, replica: int, keys: Iterable[Key]) -> None:
        """Records that ``replica`` no longer holds ``keys``; keys that it was not known to hold are ignored."""
        held = self._held.get(replica)
        if not held:
            return
        for key in keys:
            if key in held:
                del held[key]
                self._remove_holder(replica, key)

    def forget(self, replica: int) -> None:
        """Records that ``replica`` holds nothing any more."""
        for key in self._held.pop(replica, ()):
            self._remove_holder(replica, key)

    def _remove_holder(self, replica: int, key: Key) -> None:
        holders = self._holders[key]
        holders.remove(replica)
        if not holders:
            del self._holders[key]


RANDOM_REPLICAS = 8
"""Replicas that are drawn at random for each decision."""

MAX_PREFIX_HOLDERS = 8
"""Most holders of a prefix that a decision examines."""

MAX_IMAGES, MAX_IMAGE_HOLDERS = 4, 4
"""Most images of a request whose holders are examined, and most holders of each."""

UNKNOWN = -1
"""Stands for an unknown number of tokens that a replica holds."""

OWN_WORK_WEIGHT = 1.5
"""Weight of a request's own seconds against those of the wait: duplicated work also delays later requests."""

COPY_WEIGHT = 2.0
"""Weight of the cost of a copy against the seconds that requests have waited for lack of it."""

MAX_INDEX_ENTRIES = 1 << 21
"""Most pairs of a prefix and a holder in the index, of all replicas together."""


class PrefixAffinityRouter:
    """Chooses a replica for each request from the replicas' loads and cached contents.

    Args:
        replicas: most replicas; their numbers are [0, replicas).
        costs: makes the step costs of replica i; the objects are kept, and callers may update them.
        rows: requests that a replica runs at a time; 0: any number.
        capacity: tokens of a replica's KV cache; 0: unknown.
        bound: pairs of a prefix and a holder in the index, of all replicas together.
        seed: of the draws.
    """

    def __init__(
        self,
        replicas: int,
        costs: Callable[[int], StepCosts] = lambda i: StepCosts(),
        rows: int = 0,
        capacity: int = 0,
        bound: int = MAX_INDEX_ENTRIES,
        seed: int = 0,
    ) -> None:
        self._lines = array("d", bytes(8 * LINE_WORDS * replicas))
        self.loads = [ReplicaLoad(costs(i), rows, capacity, self._lines, LINE_WORDS * i) for i in range(replicas)]
        self._costs = [load.costs for load in self.loads]
        self.prefixes = CacheIndex(bound // replicas)
        self.images = CacheIndex(bound // replicas // 4)
        self.replication = ReplicationPolicy()
        self.examined = 0
        """Number of replicas that the last decision scored."""
        self._open: list[int] = []
        self._is_open = [False] * replicas
        self._random = random.Random(seed).random

    def open(self, replica: int) -> None:
        """Lets ``replica`` take requests."""
        if not self._is_open[replica]:
            self._is_open[replica] = True
            self._open.append(replica)

    def close(self, replica: int) -> None:
        """Stops new requests to ``replica``; its contents stay known."""
        if self._is_open[replica]:
            self._is_open[replica] = False
            self._open.remove(replica)

    def on_engine_lost(self, replica: int) -> None:
        """Handles the end of a replica's engine: closes the replica and forgets what it held."""
        self.close(replica)
        self.prefixes.forget(replica)
        self.images.forget(replica)

    def on_evicted(self, replica: int, prefixes: Iterable[Key], images: Iterable[Key] = ()) -> None:
        """Records the contents that ``replica`` reports as evicted."""
        self.prefixes.remove_evicted(replica, prefixes)
        self.images.remove_evicted(replica, images)

    def choose(self, cost: RequestCost, now: float, avoid: Collection[int] = (), pinned: int = -1) -> Assignment | None:
        """Chooses the replica for a request and charges it at once; None if none is open.

        Args:
            now: seconds of the caller's clock, which must be the same for all calls.
            avoid: replicas that are not to be chosen.
            pinned: the only replica that may be chosen; -1: any.
        """
        self.examined = 0
        candidates = {pinned: UNKNOWN} if pinned >= 0 else self._select_candidates(cost, now, avoid)
        self.examined += len(candidates)
        lines, tokens, opened = self._lines, cost.tokens, self._is_open
        best, held, least, first = -1, 0, math.inf, 0.0
        idle, there, shortest = -1, UNKNOWN, math.inf
        for replica, known in candidates.items():
            if not opened[replica] or replica in avoid:
                continue
            wait = predict_wait(
                lines, LINE_WORDS * replica, now
            )  # most of the time of a decision is spent in these three lines
            if tokens > lines[LINE_WORDS * replica + SPARE]:
                wait += self.loads[replica].predict_capacity_wait(tokens)
            if wait < least:  # else it cannot win, whatever its contents
                if known < 0:
                    known = self._count_held_tokens(replica, cost)
                score = wait + OWN_WORK_WEIGHT * self._estimate_own_seconds(replica, cost, known)
                if score < least:
                    best, held, least, first = replica, known, score, wait
            if wait < shortest:
                idle, there, shortest = replica, known, wait
        if best < 0:
            left = [] if pinned >= 0 else [r for r in self._open if r not in avoid]
            return self.assign(left[int(self._random() * len(left))], cost, now) if left else None
        if idle != best:
            if there < 0:
                there = self._count_held_tokens(idle, cost)
            if self._should_replicate(cost, best, held, idle, there, first - shortest):
                best, held = idle, there
        return self.assign(best, cost, now, held)

    def _should_replicate(self, cost: RequestCost, best: int, held: int, idle: int, there: int, seconds: float) -> bool:
        """True if the request should go to the idle replica and recompute the prefix there, instead of waiting for
        the best one.
        """
        if held:
            key = next(p.key for p in reversed(cost.prefixes) if p.tokens == held)
        else:
            key = next((p.key for p in cost.images if self.images.holds(best, p.key)), -1)
            if key < 0:
                return False  # the idle replica is only faster
        price = self._estimate_own_seconds(idle, cost, there) - self._estimate_own_seconds(best, cost, held)
        return self.replication.should_replicate(key, seconds, COPY_WEIGHT * price)

    def assign(self, replica: int, cost: RequestCost, now: float, held: int = UNKNOWN) -> Assignment:
        """Charges ``replica``, which holds the first ``held`` tokens of a request, and records the contents that it
        will hold.
        """
        if held < 0:
            held = self._count_held_tokens(replica, cost)
        ticket = Assignment(replica, self._estimate_own_seconds(replica, cost, held), cost.tokens)
        self.loads[replica].charge(ticket, now)
        # The longest prefix first, so that a shorter one counts as used later: caches evict tails first.
        self.prefixes.mark_used(replica, [p.key for p in reversed(cost.prefixes)])
        if cost.images:
            # An image within the cached prefix is neither looked up nor encoded.
            self.images.mark_used(replica, [p.key for p in cost.images if p.end > held])
        return ticket

    def on_first_token(self, ticket: Assignment, now: float) -> None:
        """Records the first token of a request."""
        self.loads[ticket.replica].on_first_token(ticket, now)

    def on_ended(self, ticket: Assignment, now: float) -> None:
        """Records the end of a request, for whatever reason; must be called exactly once."""
        self.loads[ticket.replica].on_ended(ticket, now)

    def _select_candidates(self, cost: RequestCost, now: float, avoid: Collection[int]) -> Mapping[int, int]:
        """Returns replicas and the tokens that each is known to hold; holders come first, so that they win ties.

        These are all open ones if they are few; else holders, and of a random draw the one with the shortest wait,
        since it is not known what the drawn ones hold.
        """
        count, draw = len(self._open), self._random
        if count <= RANDOM_REPLICAS + MAX_PREFIX_HOLDERS:
            start = int(draw() * max(count, 1))
            return dict.fromkeys([*self._open[start:], *self._open[:start]], UNKNOWN)
        found: dict[int, int] = {}
        longest = seen = 0
        for key, tokens in reversed(cost.prefixes):
            holders = self.prefixes.get_holders(key)
            if len(holders) != seen:  # else they are the holders of the longer prefix
                longest, seen = longest or tokens, len(holders)
                # Replicas not found yet hold no longer prefix: all holders of each longer one were added.
                if self._add_holders(holders, MAX_PREFIX_HOLDERS - len(found), found, tokens):
                    break
        for image in cost.images[:MAX_IMAGES]:
            if image.end > longest:
                self._add_holders(self.images.get_holders(image.key), MAX_IMAGE_HOLDERS, found, UNKNOWN)
        self.examined += RANDOM_REPLICAS
        drawn, shortest = -1, math.inf
        opened, lines, tokens = self._open, self._lines, cost.tokens
        for _ in range(RANDOM_REPLICAS):
            replica = opened[int(draw() * count)]
            if replica in avoid:
                continue
            wait = predict_wait(lines, LINE_WORDS * replica, now)
            if tokens > lines[LINE_WORDS * replica + SPARE]:
                wait += self.loads[replica].predict_capacity_wait(tokens)
            if wait < shortest:
                drawn, shortest = replica, wait
        if drawn >= 0:
            found.setdefault(drawn, UNKNOWN)
        return found

    def _add_holders(self, holders: Sequence[int], most: int, found: dict[int, int], tokens: int) -> bool:
        """Adds at most ``most`` of ``holders``, starting at a random position; returns True if no more may be added."""
        count = len(holders)
        if count <= most:
            for holder in holders:
                found.setdefault(holder, tokens)
            return count == most
        start = int(self._random() * count)
        for i in range(start, start + most):
            found.setdefault(holders[i - count if i >= count else i], tokens)
        return True

    def _estimate_own_seconds(self, replica: int, cost: RequestCost, held: int) -> float:
        """Estimates the seconds of the request's own work on ``replica``: images it does not hold, and prompt tokens
        beyond the first ``held``.
        """
        costs = self._costs[replica]
        seconds = costs.token * (cost.tokens - held)
        for image in cost.images:
            if image.end > held and not self.images.holds(replica, image.key):
                seconds += costs.slot * image.slots
        return seconds

    def _count_held_tokens(self, replica: int, cost: RequestCost) -> int:
        """Returns the number of prompt tokens in the longest prefix that ``replica`` holds, found by bisection (a
        holder of a prefix holds all shorter ones).
        """
        prefixes = cost.prefixes
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
