"""Which graphs are captured: priced before, measured after, rolled back above the pool, handed on what is left.

The budget decides what is captured, never what is compiled. Nothing here ends a start-up: a capture that fails leaves
its bucket compiled.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trencadis.core import graph_budget as budget
from trencadis.core.backend import State
from trencadis.core.buckets import Bucket, padded_tokens
from trencadis.core.failures import line, ran_out
from trencadis.core.graph_budget import Price
from trencadis.core.graphs import GraphManager
from trencadis.core.journal import Journal
from trencadis.core.ledger import (
    POOLS,
    Before,
    Books,
    Division,
    GraphSettings,
    Ledger,
    closed_books,
    pool_of,
    unused_line,
)
from trencadis.core.memory_plan import gib

log = logging.getLogger("trencadis.engine")


@dataclass
class Captures:
    """The graphs of one rank and their books.

    Args:
        before: what is spoken for beside KV cache and graphs.
        prices: predicted bytes of every planned graph beside its inputs, which are there already.
        multimodal: prompts share their pool with images.
        least_kv: bytes of KV cache that one request of the full length needs; ``block_bytes``: of one block.
    """

    graphs: GraphManager
    before: Before
    division: Division
    settings: GraphSettings
    prices: Sequence[Price]
    multimodal: bool = False
    least_kv: int = 0
    block_bytes: int = 1
    journal: Journal = field(default_factory=Journal)
    measured: dict[Bucket, int] = field(default_factory=dict)
    failed: dict[Bucket, str] = field(default_factory=dict)
    unavailable: bool = False
    """The device has no graphs in this mode; buckets stay compiled."""

    def __post_init__(self) -> None:
        self.books = Books(self.division.pools())
        self.by_bucket = {p.bucket: p for p in self.prices}
        self.tried: set[Bucket] = set()
        self.ledger = Ledger(self.before, self.division)
        self._said = False
        self.graphs.released = self.gave_up

    @property
    def rule(self) -> str:
        """What a set of graphs costs on this device."""
        return self.graphs.backend.policy.pool_cost

    def predicted(self, bucket: Bucket) -> int:
        """Bytes that capturing ``bucket`` is expected to take."""
        return budget.predict(bucket, 0, self.by_bucket[bucket].alone, self.measured)

    def observe(self) -> None:
        """Brings the ledger up to date; a workspace that grew after the profile belongs to the activations."""
        books = self.books
        known = self.before.taken + self.division.kv + sum(books.spent.values()) + sum(books.lost.values())
        drift = self.before.total - self.free() - known
        settled = dataclasses.replace(self.before, activations=max(self.before.activations + drift, 0))
        self.ledger = closed_books(settled, self.division, books)

    def attempt(self, bucket: Bucket) -> bool:
        """Captures ``bucket`` if its pool and the device can pay for it; True where it now has a graph."""
        done = self._attempt(bucket)
        self.observe()
        return done

    def _attempt(self, bucket: Bucket) -> bool:
        pool = pool_of(bucket.stage)
        self.tried.add(bucket)
        if self.settings.eager or self.unavailable or bucket in self.failed or not self._compiled(bucket):
            return False
        if self.journal.skips(bucket):
            self._fail(bucket, "an earlier start ended in its capture")
            return False
        predicted, free = self.predicted(bucket), self.free()
        if not budget.pays(predicted, self.books.left(pool)) or not budget.may_start(predicted, free):
            return False
        return self._capture(bucket, pool, free)

    def _compiled(self, bucket: Bucket) -> bool:
        return self.graphs.state(bucket) is State.COMPILED

    def _capture(self, bucket: Bucket, pool: str, free: int) -> bool:
        program = self.graphs.program(bucket)
        why = ""
        self.graphs.settle()
        before = self.graphs.enter("capturing")
        try:
            with self.journal.capture(bucket):
                program.capture()
        except Exception as error:
            why = line(error)
        self.graphs.enter(before)
        self.graphs.expected()
        if why:
            self._failed(bucket, pool, free, why)
            return False
        if program.state is not State.CAPTURED:
            self.unavailable = True
            return False
        cost = max(free - self.free(), 0)
        self.measured[bucket] = cost
        if self.books.charge(pool, cost):
            return True
        self._roll_back(bucket, pool, cost)
        return False

    def _roll_back(self, bucket: Bucket, pool: str, cost: int) -> None:
        """The graph ended above its pool; what does not come back stays charged."""
        before = self.free()
        self.graphs.program(bucket).release()
        back = max(self.free() - before, 0)
        self.books.release(pool, cost, back)
        self.graphs.changes += 1
        log.info("%s took %s, more than its pool holds: released, %s came back", bucket, gib(cost), gib(back))

    def _failed(self, bucket: Bucket, pool: str, free: int, why: str) -> None:
        """What a failed capture took and does not give back is charged; the exception's frames are gone by now."""
        self._fail(bucket, why)
        gc.collect()
        self.books.lost[pool] += max(free - self.free(), 0)

    def _fail(self, bucket: Bucket, why: str) -> None:
        self.failed[bucket] = why
        pool = pool_of(bucket.stage)
        if ran_out(RuntimeError(why)):
            self.books.close(pool)
            why += f"; no more graphs from the {pool} pool"
        log.warning("%s gets no graph: %s", bucket, why)

    def gave_up(self, bucket: Bucket, returned: int) -> None:
        """A graph was released while serving."""
        cost = self.measured.get(bucket, 0)
        self.books.release(pool_of(bucket.stage), cost, returned)

    def free(self) -> int:
        """Free bytes of the device once everything submitted is done."""
        self.graphs.backend.synchronize()
        return self.graphs.backend.memory.free()

    # Whole passes

    def choice(self) -> list[Bucket]:
        """What each pool can pay by today's predictions, in the device's order of capture."""
        prices = [Price(p.bucket, self.predicted(p.bucket), 0, p.gain) for p in self.prices]
        found: list[Bucket] = []
        for pool in POOLS:
            mine = [p for p in prices if pool_of(p.bucket.stage) == pool]
            won = budget.winners(mine, self.books.left(pool), self.settings.strategy(pool), self.rule)
            found += [p.bucket for p in won]
        if self.graphs.backend.policy.capture_order == "descending":
            found.sort(key=lambda b: (-padded_tokens(b), b))
        return found

    def sweep(self) -> Iterator[Bucket]:
        """The chosen ones, then whatever else the pools turn out to hold; yields each bucket that was tried."""
        for bucket in self.choice():
            self.attempt(bucket)
            yield bucket
        for pool in POOLS:
            yield from self._fill(pool)

    def leftovers(self) -> Iterator[Bucket]:
        """Hands what is left to the pool with most uncaptured gain per byte, then to the next."""
        every: dict[str, list[Price]] = {pool: [] for pool in POOLS}
        for price in self.prices:
            if price.bucket not in self.failed:
                every[pool_of(price.bucket.stage)].append(price)
        have = set(self.graphs.captured())
        taken = {pool: [p for p in prices if p.bucket in have] for pool, prices in every.items()}
        for pool in budget.by_gain(every, taken):
            self.books.hand_over(pool)
            yield from self._fill(pool)

    def _fill(self, pool: str) -> Iterator[Bucket]:
        mine = [p for p in self.prices if pool_of(p.bucket.stage) == pool]
        for price in budget.ordered(mine, self.settings.strategy(pool)):
            if self.graphs.state(price.bucket) is State.COMPILED and price.bucket not in self.failed:
                if self.books.left(pool) <= 0:
                    return
                self.attempt(price.bucket)
                yield price.bucket

    def at_first_use(self, bucket: Bucket) -> None:
        """Skipped warm-up: the graph is made by the launch that needs it first."""
        if self.attempt(bucket) or bucket in self.failed or self.settings.eager or self.unavailable or self._said:
            return
        self._said = True
        log.warning("%s gets no graph: %s", bucket, " ".join(self.advice()) or "its pool is used up.")

    def advice(self) -> list[str]:
        """What to set so that every planned bucket gets its graph, or so that an unused reserve becomes KV blocks."""
        if self.settings.eager:
            return []
        prices = [Price(p.bucket, self.predicted(p.bucket), 0, p.gain) for p in self.prices]
        have = set(self.graphs.captured())
        missing = tuple(p for p in prices if p.bucket not in have)
        wanted = [p for p in prices if p.bucket not in self.failed]
        holds = budget.reserve_that_holds(
            wanted, self.division, self.settings, self.rule, self.multimodal, self.least_kv
        )
        lines = [budget.exhausted_line(budget.Choice({}, {}, missing), holds, self.division)]
        if holds is not None and not missing:
            lines.append(unused_line(self.ledger, self.block_bytes, self.settings.reserved, holds))
        return [text for text in lines if text]
