"""Captures graphs within the memory budget.

Each graph is priced before its capture, measured after it, and released if its pool is overdrawn; the bytes that a pool
has left over go to the others. The budget decides what is captured, not what is compiled. A failed capture never ends
the start-up: its bucket stays compiled.

Reports each capture to the parent process, so that a bucket whose capture kills the engine is skipped next time.

Nothing is written to disk: the engine reports to its parent before and after each capture. If an engine dies during a
capture, the parent passes the bucket to the next engine. Other ranks report to the engine, which names the bucket if
one of them dies. Each pipeline stage has its own graphs, so stages after the first prefix the bucket with their stage
number.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.device.backend import ProgramState
from trencadis.core.device.communicators_and_rank_agreement import RankAgreement
from trencadis.core.device_shape_policy import capturable
from trencadis.core.errors import format_error, is_out_of_memory
from trencadis.core.graph_and_bucket_learning_report import (
    EAGER,
    FAILED,
    LARGE,
    NO_GRAPHS,
    POOL_FULL,
    RELEASED,
    WARMING,
)
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.host_memory import gib
from trencadis.core.memory import graph_selection as budget
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.memory.memory_division import (
    DECODE,
    POOLS,
    TEXT,
    VISION,
    GraphSettings,
    Ledger,
    MemoryInUse,
    MemorySplit,
    PoolAccounts,
    final_ledger,
    pool_of,
    unused_line,
)
from trencadis.core.shapes.shape_need_histogram import RECORDED_STAGES

ReportCapture = Callable[[str, bool], None]
"""Called with the bucket, and True before its capture, False after it."""


class CaptureJournal:
    """Reports the captures of one engine.

    Args:
        skip: printed names of buckets in whose capture an earlier engine died.
        tell: called before and after every capture, even if it raises.
        stage: number of this pipeline stage.
    """

    def __init__(
        self, skip: Iterable[str] = (), tell: ReportCapture = lambda bucket, begun: None, stage: int = 0
    ) -> None:
        self._skip, self._report, self._stage = frozenset(skip), tell, stage

    def skips(self, bucket: object) -> bool:
        """Returns True if this bucket must not be captured."""
        return self._name(bucket) in self._skip

    @contextmanager
    def capture(self, bucket: object) -> Iterator[None]:
        """Reports the capture that runs inside the ``with`` block."""
        name = self._name(bucket)
        self._report(name, True)
        try:
            yield
        finally:
            self._report(name, False)

    def _name(self, bucket: object) -> str:
        return f"stage {self._stage} {bucket}" if self._stage else str(bucket)


log = logging.getLogger("trencadis.engine")


class CaptureOutcome(IntEnum):
    """Outcome of a capture; the smallest one over all ranks applies to all."""

    OUT_OF_MEMORY = 0
    FAILED = 1
    NO_GRAPHS = 2
    CAPTURED = 3


ELSEWHERE = {
    CaptureOutcome.OUT_OF_MEMORY: "out of memory on another rank",
    CaptureOutcome.FAILED: "its capture failed on another rank",
}


@dataclass
class GraphCaptures:
    """The graphs of one rank and what they cost. Ranks agree on every figure that decides what is captured next.

    Args:
        memory_in_use: the bytes in use other than KV cache and graphs.
        prices: predicted bytes of every planned graph, without its inputs, which are already allocated.
        multimodal: True if text and VISION graphs share the bytes for prompts.
        least_kv: bytes of KV cache that one request of maximum length needs. block_bytes: bytes of one KV block.
        keep: stores the measurements; called whenever there are new ones.
    """

    graphs: GraphManager
    memory_in_use: MemoryInUse
    memory_split: MemorySplit
    settings: GraphSettings
    prices: Sequence[GraphPrice]
    multimodal: bool = False
    least_kv: int = 0
    block_bytes: int = 1
    journal: CaptureJournal = field(default_factory=CaptureJournal)
    keep: Callable[[GraphCaptures], None] = lambda captures: None
    measured: dict[Bucket, int] = field(default_factory=dict)
    launches: dict[Bucket, float] = field(default_factory=dict)
    """Median seconds of launches on the device, of this and of earlier servers."""
    failed: dict[Bucket, str] = field(default_factory=dict)
    unavailable: bool = False
    """True if the device has no graphs in this mode, so that buckets stay compiled."""

    def __post_init__(self) -> None:
        self.agree = RankAgreement(self.graphs.backend)
        pools = self.memory_split.pools()
        self.accounts = PoolAccounts(dict(zip(POOLS, self.agree.least(*(pools[p] for p in POOLS)), strict=True)))
        """Accounts that are equal on all ranks, so that they decide alike: the lowest budgets and the highest costs."""
        self.own = PoolAccounts(pools)
        """Accounts of this rank alone, used for its ledger."""
        self.costs: dict[Bucket, int] = {}
        """Bytes that this rank's graphs took; ``measured`` holds the highest of all ranks."""
        self.seconds: dict[str, float] = defaultdict(float)
        """Time spent on captures, by stage."""
        self.took: dict[Bucket, float] = {}
        """Seconds of each bucket's last capture."""
        self.given_up: set[Bucket] = set()
        self._formulas: dict[Bucket, GraphPrice] = {}
        """Prices of all graphs that are or were planned, since a measured cost predicts those of its neighbours."""
        self.unavailable = self.unavailable or bool(self.graphs.backend.policy.graphless)
        self.set_prices(self.prices)
        self._first = self.wanted
        self.tried: set[Bucket] = set()
        self.firsts: set[Bucket] = set()
        """First graph of each stage, whose cost includes the shared workspace."""
        self.ledger = Ledger(self.memory_in_use, self.memory_split)
        self._said = False
        self.graphs.observer.attach(self)

    def set_prices(self, prices: Sequence[GraphPrice]) -> None:
        """Sets the graphs that can be captured from now on, with their predicted bytes."""
        self.prices = prices
        self.by_bucket = {p.bucket: p for p in prices}
        self._formulas.update(self.by_bucket)
        self.wanted = [p for p in prices if capturable(self.graphs.plan.policy, p.bucket)]
        """Graphs that make launches faster."""

    def list_bytes(self) -> dict[Bucket, int]:
        """Returns the bytes of each planned graph, measured or predicted; none where graphs share their workspace."""
        return {} if self.rule == "max" else {p.bucket: self.measured.get(p.bucket, p.alone) for p in self.wanted}

    def list_learned_pools(self) -> list[tuple[frozenset[Stage], float]]:
        """Returns the bytes of the pools for the stages whose buckets are learned, less what other graphs take.

        Where a pool does not hold the graphs of the first plan, the largest ones run compiled; buckets are then learned
        whose graphs would take as much as those of the first plan, of which the pool holds the smaller ones again.
        """
        if self.settings.eager or self.unavailable:
            return []
        sizes, budgets, found = self.list_bytes(), self.accounts.budget, list[tuple[frozenset[Stage], float]]()
        for pools in ((TEXT, VISION), (DECODE,)) if self.multimodal else ((TEXT,), (VISION,), (DECODE,)):
            learned = frozenset(stage for stage in RECORDED_STAGES if pool_of(stage) in pools)
            others = sum(n for b, n in sizes.items() if pool_of(b.stage) in pools and b.stage not in learned)
            first = sum(self.measured.get(p.bucket, p.alone) for p in self._first if p.bucket.stage in learned)
            found.append((learned, float(max(sum(budgets[pool] for pool in pools) - others, first))))
        return found

    def keep_launches(self, seconds: Mapping[Bucket, float]) -> None:
        """Stores median seconds of launches beside the other measurements."""
        self.launches = {**self.launches, **seconds}
        self.keep(self)

    def add_inputs(self, count: int) -> None:
        """Charges ``count`` bytes to the inputs of programs; negative: they were freed."""
        held = max(self.memory_in_use.inputs + count, 0)
        self.memory_in_use = dataclasses.replace(self.memory_in_use, inputs=held)

    def forget(self, bucket: Bucket) -> None:
        """Forgets the state of a bucket that is not planned any more; what its graph cost stays known."""
        for held in (self.tried, self.given_up):
            held.discard(bucket)
        self.failed.pop(bucket, None)
        self.costs.pop(bucket, None)

    @property
    def rule(self) -> str:
        """How the workspaces of graphs add up on this device: ``sum`` or ``max`` (``Policy.pool_cost``)."""
        return self.graphs.backend.policy.pool_cost

    def predict_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes that capturing ``bucket`` is expected to add to the graphs captured so far."""
        if self.rule == "max":
            priced = self._price_shared(bucket)
            return priced.own + max(priced.workspace - self._workspaces().get(bucket.stage, 0), 0)
        return budget.predict_bytes(bucket, lambda b: self._formulas[b].alone, self.measured)

    def _workspaces(self) -> dict[Stage, int]:
        """The workspace that the captured graphs of each stage share."""
        return budget.held_workspace(self.by_bucket[b] for b in self.graphs.list_captured() if b in self.by_bucket)

    def _price_shared(self, bucket: Bucket) -> GraphPrice:
        """Returns the price of a graph that shares its workspace with others.

        A measured cost is a graph's own bytes plus the growth of the workspace. The highest cost among the stage's
        later graphs is used as the graph's own bytes, and the workspace comes from the formula.
        """
        priced = self.by_bucket[bucket]
        mine = [c for b, c in self.measured.items() if b.stage is bucket.stage and b not in self.firsts]
        return GraphPrice(bucket, max(mine, default=priced.own), priced.workspace, priced.gain)

    def observe(self) -> None:
        """Updates the ledger; a workspace that grew after the profile counts as activations."""
        accounts = self.own
        known = (
            self.memory_in_use.taken + self.memory_split.kv + sum(accounts.spent.values()) + sum(accounts.lost.values())
        )
        drift = self.memory_in_use.total - self.free_bytes() - known
        settled = dataclasses.replace(self.memory_in_use, activations=max(self.memory_in_use.activations + drift, 0))
        self.ledger = final_ledger(settled, self.memory_split, accounts)

    def attempt(self, bucket: Bucket) -> bool:
        """Captures ``bucket`` if its pool and the device have enough bytes; returns True if it has a graph now."""
        done = self._attempt(bucket)
        self.observe()
        return done

    def _attempt(self, bucket: Bucket) -> bool:
        pool = pool_of(bucket.stage)
        self.tried.add(bucket)
        if self.settings.eager or self.unavailable or bucket in self.failed or not self.is_worth_capturing(bucket):
            return False
        if self.journal.skips(bucket):
            self._mark_failed(bucket, "an earlier start ended in its capture")
            return False
        predicted, free = self.predict_bytes(bucket), self.free_bytes()
        compiled, least = self.agree.least(int(self.graphs.state(bucket) is ProgramState.COMPILED), free)
        if (
            not compiled
            or not budget.can_pay(predicted, self.accounts.remaining(pool))
            or not budget.may_start(predicted, least)
        ):
            return False
        return self._capture(bucket, pool, free)

    def _capture(self, bucket: Bucket, pool: str, free: int) -> bool:
        """Captures the graph; ranks agree on the outcome before any of them replays it."""
        here, why = self._try(bucket)
        cost = max(free - self.free_bytes(), 0) if here is CaptureOutcome.CAPTURED else 0
        worst, dearest = self.agree.least(here, -cost)
        if worst == CaptureOutcome.CAPTURED:
            self.costs[bucket], self.measured[bucket] = cost, -dearest
            return self._charge(bucket, pool)
        if here is CaptureOutcome.CAPTURED:
            self.graphs.program(bucket).release()
        if worst == CaptureOutcome.NO_GRAPHS:
            self.unavailable = True
        else:
            self._charge_failure(
                bucket, pool, free, why or ELSEWHERE[CaptureOutcome(worst)], worst == CaptureOutcome.OUT_OF_MEMORY
            )
        return False

    def list_making_seconds(self) -> dict[Bucket, float]:
        """Returns the seconds that compiling and capturing each bucket took."""
        return {bucket: seconds + self.took.get(bucket, 0.0) for bucket, seconds in self.graphs.took.items()}

    def _try(self, bucket: Bucket) -> tuple[CaptureOutcome, str]:
        """Makes one capture on this rank; returns its outcome and, if it failed, the reason."""
        program = self.graphs.program(bucket)
        how, why = CaptureOutcome.CAPTURED, ""
        if self.rule == "max" and not self._workspaces().get(bucket.stage):
            self.firsts.add(bucket)
        self.graphs.count_recompiles()
        before, start = self.graphs.observer.enter("capturing"), time.perf_counter()
        try:
            with self.journal.capture(bucket):
                program.capture()
        except Exception as error:
            how, why = (
                CaptureOutcome.OUT_OF_MEMORY if is_out_of_memory(error) else CaptureOutcome.FAILED,
                format_error(error),
            )
        self.graphs.observer.enter(before)
        self.took[bucket] = time.perf_counter() - start
        self.seconds[bucket.stage.name.lower()] += self.took[bucket]
        self.graphs.accept_compilations()
        if how is CaptureOutcome.CAPTURED and program.state is not ProgramState.CAPTURED:
            how = CaptureOutcome.NO_GRAPHS
        return how, why

    def _charge(self, bucket: Bucket, pool: str) -> bool:
        """Charges a graph that every rank has captured; releases it if its pool is overdrawn now."""
        self.own.charge(pool, self.costs[bucket])
        if self.accounts.charge(pool, self.measured[bucket]):
            return True
        before = self.free_bytes()
        self.graphs.program(bucket).release()
        back = max(self.free_bytes() - before, 0)
        self._release(bucket, back)
        self.graphs.changes += 1
        cost = gib(self.measured[bucket])
        log.info("%s took %s, more than its pool holds: released, %s came back", bucket, cost, gib(back))
        return False

    def _release(self, bucket: Bucket, back: int) -> None:
        """Refunds a released graph; the bytes not recovered on the worst rank stay charged on all ranks."""
        pool, cost, own = pool_of(bucket.stage), self.measured.get(bucket, 0), self.costs.get(bucket, 0)
        self.own.release(pool, own, back)
        (short,) = self.agree.most(own - back)  # negative: memory of graphs released earlier came back on every rank
        self.accounts.release(pool, cost, cost - min(short, cost))

    def _charge_failure(self, bucket: Bucket, pool: str, free: int, why: str, full: bool) -> None:
        """Charges the bytes that a failed capture did not give back.

        The exception's frames, which may hold tensors, have been dropped before.
        """
        if full:
            self.accounts.close(pool)
        self._mark_failed(bucket, why + (f"; no more graphs from the {pool} pool" if full else ""))
        gc.collect()
        lost = max(free - self.free_bytes(), 0)
        self.own.lost[pool] += lost
        self.accounts.lost[pool] += self.agree.most(lost)[0]

    def _mark_failed(self, bucket: Bucket, why: str) -> None:
        self.failed[bucket] = why
        log.warning("%s gets no graph: %s", bucket, why)

    def refund_released(self, bucket: Bucket, returned: int) -> None:
        """Refunds a graph that was released while serving."""
        self.given_up.add(bucket)
        self._release(bucket, returned)

    def is_worth_capturing(self, bucket: Bucket) -> bool:
        """Returns True if a graph makes launches of ``bucket`` faster."""
        return capturable(self.graphs.plan.policy, bucket)

    def missing_reason(self, bucket: Bucket) -> str:
        """Returns why a compiled bucket has no graph, as named in core/graph_and_bucket_learning_report.py."""
        if self.unavailable:
            return NO_GRAPHS
        if self.settings.eager:
            return EAGER
        if not self.is_worth_capturing(bucket):
            return LARGE
        if bucket in self.given_up:
            return RELEASED
        if bucket in self.failed:
            return FAILED
        return WARMING if self.graphs.unready == WARMING and bucket not in self.tried else POOL_FULL

    def free_bytes(self) -> int:
        """Returns the free bytes of the device after its submitted work has finished."""
        self.graphs.backend.synchronize()
        return self.graphs.backend.memory.free()

    # Passes over all buckets

    def selection(self) -> list[Bucket]:
        """Returns the graphs that fit each pool by current predictions, in the device's order of capture."""
        prices = self._price_wanted()
        found: list[Bucket] = []
        for pool in POOLS:
            mine = [p for p in prices if pool_of(p.bucket.stage) == pool]
            won = budget.affordable_graphs(mine, self.accounts.remaining(pool), self.settings.strategy(pool), self.rule)
            found += [p.bucket for p in won]
        if self.graphs.backend.policy.capture_order == "descending":
            found.sort(key=lambda b: (-padded_tokens(b), b))
        return found

    def _price_wanted(self) -> list[GraphPrice]:
        """Returns all graphs worth capturing at their current predictions."""
        if self.rule == "max":
            return [self._price_shared(p.bucket) for p in self.wanted]
        return [GraphPrice(p.bucket, self.predict_bytes(p.bucket), 0, p.gain) for p in self.wanted]

    def capture_selected(self) -> Iterator[Bucket]:
        """Captures the selected graphs, then as many others as fit the pools; yields each bucket that was tried."""
        for bucket in self.selection():
            self.attempt(bucket)
            yield bucket
        for pool in POOLS:
            yield from self._fill(pool)

    def spend_leftovers(self) -> Iterator[Bucket]:
        """Gives unspent bytes to the pools with the most uncaptured gain per byte.

        Yields each bucket that was tried.
        """
        every: dict[str, list[GraphPrice]] = {pool: [] for pool in POOLS}
        for price in self.wanted:
            if price.bucket not in self.failed:
                every[pool_of(price.bucket.stage)].append(price)
        have = set(self.graphs.list_captured())
        taken = {pool: [p for p in prices if p.bucket in have] for pool, prices in every.items()}
        for pool in budget.by_gain(every, taken):
            self.accounts.hand_over(pool)
            yield from self._fill(pool)

    def _fill(self, pool: str) -> Iterator[Bucket]:
        have = set(self.graphs.list_captured())
        mine = [p for p in self.wanted if pool_of(p.bucket.stage) == pool]
        for price in budget.order_prices(mine, self.settings.strategy(pool)):
            if price.bucket not in have and price.bucket not in self.failed:
                if self.accounts.remaining(pool) <= 0:
                    return
                self.attempt(price.bucket)
                yield price.bucket

    def capture_at_first_use(self, bucket: Bucket) -> None:
        """Captures the graph when a launch first needs the bucket; used if warm-up is skipped."""
        self._at_first_use(bucket)
        self.keep(self)

    def _at_first_use(self, bucket: Bucket) -> None:
        if self.attempt(bucket) or bucket in self.failed or self.settings.eager or self.unavailable or self._said:
            return
        if not self.is_worth_capturing(bucket):
            return
        self._said = True
        log.warning("%s gets no graph: %s", bucket, " ".join(self.advice()) or "its pool is used up.")

    def advice(self) -> list[str]:
        """Returns lines of advice: the setting with which all planned buckets get graphs, or how to turn an unused
        reserve into KV cache.
        """
        if self.settings.eager:
            return []
        prices = self._price_wanted()
        have = set(self.graphs.list_captured())
        missing = tuple(p for p in prices if p.bucket not in have)
        wanted = [p for p in prices if p.bucket not in self.failed]
        holds = budget.reserve_that_holds(
            wanted, self.memory_split, self.settings, self.rule, self.multimodal, self.least_kv
        )
        lines = [budget.exhausted_line(budget.GraphSelection({}, {}, missing), holds, self.memory_split)]
        if holds is not None and not missing:
            lines.append(unused_line(self.ledger, self.block_bytes, self.settings.reserved, holds))
        return [text for text in lines if text]
