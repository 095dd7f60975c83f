"""Changes the plan of a rank while it serves: new buckets are made ready one piece at a time, then all are published.

A piece runs between two Steps with nothing in flight, as background warm-up does, so that no Step waits for a compiler.
Until the last piece, Steps use the old plan. If a piece fails on any rank, every rank keeps the old plan and releases
what was made for the new one. All ranks run the same pieces in the same order.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Sequence

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, padded_tokens
from trencadis.core.errors import format_error
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.memory import graph_selection as budget
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.memory.memory_division import pool_of
from trencadis.core.shapes.plan_from_recorded_needs import KEPT_STAGES
from trencadis.core.startup_progress_and_warmup_pacing import Warming

log = logging.getLogger("trencadis.engine")

PricePlan = Callable[[Plan], Sequence[GraphPrice]]
"""Returns the predicted bytes of every graph of a plan."""

PIECES = 3
"""Pieces of a new bucket: its inputs and compilation, its capture, one launch that must compile nothing."""


class ChangeFailed(Exception):
    """A piece of a change failed; the message says why."""


class PlanChange:
    """The change of one rank from its present plan to another one.

    Args:
        price: the prices of the graphs of either plan.
        publish: called with the new plan once all of its buckets are ready.

    Attributes:
        failure: why the old plan was kept; empty: the change goes on, or is done.
    """

    def __init__(
        self,
        graphs: GraphManager,
        captures: GraphCaptures,
        plan: Plan,
        price: PricePlan,
        publish: Callable[[Plan], None],
    ) -> None:
        self.graphs, self.captures = graphs, captures
        self.before, self.after = graphs.plan, plan
        kept, wanted = set(self.before.buckets), set(plan.buckets)
        self.added = sorted(wanted - kept, key=lambda b: (-padded_tokens(b), b))
        self.dropped = sorted(kept - wanted)
        self.failure = ""
        self.state = Warming("replanning", total=PIECES * len(self.added) + 1)
        self._price, self._publish = price, publish
        self._prices_before, self._closed = captures.prices, set(captures.accounts.closed)
        self._released: list[Bucket] = []
        self._pieces = self._run()

    def advance(self) -> Warming | None:
        """Runs one piece; returns None once the new plan is published, or the old one is kept (``failure``)."""
        bucket = next(self._pieces, None)
        if bucket is None:
            return None
        self.state.done, self.state.last = self.state.done + 1, str(bucket)
        return self.state

    def _run(self) -> Iterator[Bucket]:
        prices = list(self._price(self.after))
        self.captures.set_prices([*self._prices_before, *(p for p in prices if p.bucket in set(self.added))])
        for bucket in self.added:
            for work in (self._make, self._capture, self._rehearse):
                if why := self._attempt(work, bucket):
                    yield from self._abandon(why)
                    return
                yield bucket
        self.graphs.set_plan(self.after)
        self._publish(self.after)
        self._release(self.dropped)
        self.captures.set_prices(prices)
        self.captures.observe()
        self.captures.keep(self.captures)

    def _attempt(self, work: Callable[[Bucket], None], bucket: Bucket) -> str:
        """Runs one piece; returns why it failed on any rank, or an empty text."""
        why = ""
        try:
            work(bucket)
        except Exception as error:
            why = str(error) if isinstance(error, ChangeFailed) else format_error(error)
        self.captures.observe()
        if self.captures.agree.is_true_everywhere(not why):
            return ""
        return f"{bucket}: {why or 'it fails on another rank'}"

    def _make(self, bucket: Bucket) -> None:
        """Makes the inputs of a bucket and compiles it."""
        self.graphs.expect(bucket)
        free = self.captures.free_bytes()
        self.graphs.program(bucket)
        self.captures.add_inputs(free - self.captures.free_bytes())
        self.graphs.compile(bucket)

    def _capture(self, bucket: Bucket) -> None:
        """Captures a bucket as far as its pool allows; graphs of buckets that leave make room, the least used first."""
        captures, pool = self.captures, pool_of(bucket.stage)
        held = set(self.graphs.list_captured())
        leaving = [b for b in self.dropped if b in held and pool_of(b.stage) == pool]
        leaving.sort(key=lambda b: (self.graphs.hits[b], b))
        if captures.is_worth_capturing(bucket) and not (captures.settings.eager or captures.unavailable):
            while leaving and not budget.can_pay(captures.predict_bytes(bucket), captures.accounts.remaining(pool)):
                self._released.append(leaving.pop(0))
                captures.refund_released(self._released[-1], self.graphs.program(self._released[-1]).release())
        captures.attempt(bucket)
        if bucket in captures.failed:
            raise ChangeFailed(captures.failed[bucket])

    def _rehearse(self, bucket: Bucket) -> None:
        """Runs one launch, which must not compile anything."""
        self.graphs.count_recompiles()
        self.graphs.program(bucket).rehearse()
        self.graphs.backend.synchronize()
        if again := self.graphs.count_recompiles():
            raise ChangeFailed(f"{again} recipes are compiled again")

    def _release(self, buckets: Sequence[Bucket]) -> None:
        """Releases the programs of ``buckets``: their graphs, and the memory of their inputs."""
        held = set(self.graphs.list_captured())
        for bucket in buckets:
            returned = self.graphs.forget(bucket)
            if bucket in held:
                self.captures.refund_released(bucket, returned)
            self.captures.forget(bucket)
        free = self.captures.free_bytes()
        gc.collect()
        self.captures.add_inputs(free - self.captures.free_bytes())

    def _abandon(self, why: str) -> Iterator[Bucket]:
        """Keeps the old plan; graphs that made room are captured again."""
        log.warning("the shapes stay as they are: %s", why)
        self.failure = why
        self.graphs.set_plan(self.before)
        self._release(self.added)
        self.captures.accounts.closed = set(self._closed)
        self.captures.set_prices(self._prices_before)
        for bucket in self._released:
            self.captures.given_up.discard(bucket)
            self.captures.attempt(bucket)
            yield bucket
        self.captures.observe()


class PlanChanges:
    """The changes of one rank's plan, one at a time.

    Args:
        make: prepares the change to a plan.

    Attributes:
        running: the change that is under way.
        failure: why the last change kept the plan; empty: it was published.
    """

    def __init__(self, make: Callable[[Plan], PlanChange]) -> None:
        self._make = make
        self.running: PlanChange | None = None
        self.failure = ""

    def begin(self, plan: Plan, version: int, buckets: Sequence[Bucket]) -> None:
        """Begins the change from ``plan`` to one with ``buckets`` and the present buckets of ``KEPT_STAGES``."""
        kept = (b for b in plan.buckets if b.stage in KEPT_STAGES)
        wanted = tuple(sorted({*kept, *buckets}))
        self.running, self.failure = self._make(dataclasses.replace(plan, version=version, buckets=wanted)), ""

    def advance(self) -> Warming | None:
        """Runs one piece; returns None once the change is over."""
        assert self.running is not None
        state = self.running.advance()
        if state is None:
            self.failure, self.running = self.running.failure, None
        return state
