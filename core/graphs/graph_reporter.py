"""Reports on the graphs of an engine: the plan with states and costs, and counters."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.core.buckets import Bucket
from trencadis.core.engine_stats import GraphCounters
from trencadis.core.graph_and_bucket_learning_report import WARMING, BucketState, GraphPlan, PoolBytes
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.graphs.warmup import WARM, Warmup
from trencadis.core.memory.memory_division import POOLS, pool_of
from trencadis.core.startup_progress_and_warmup_pacing import Warming


class GraphReporter:
    """Reads values that the rank's thread writes: plain numbers and copied dictionaries, which need no lock.

    Args:
        mode: value of ``--warmup``.
    """

    def __init__(
        self,
        graphs: GraphManager,
        captures: GraphCaptures | None = None,
        mode: str = "",
        warmup: Warmup | None = None,
    ) -> None:
        self.graphs, self.captures = graphs, captures
        self.mode, self.warmup = mode, warmup
        if self.background:
            graphs.now_unready_for(WARMING)

    @property
    def version(self) -> int:
        """Grows whenever a program's state changes."""
        return self.graphs.changes

    @property
    def background(self) -> bool:
        """True if warm-up runs between steps."""
        return self.mode == "background" and self.warmup is not None

    def counters(self) -> GraphCounters:
        """Returns counters, bytes by pool, and progress of warm-up."""
        g = self.graphs
        spent, seconds = {}, {}
        if self.captures:
            spent, seconds = dict(self.captures.own.spent), dict(self.captures.seconds)
            spent["not_returned"] = sum(self.captures.own.lost.values())
        breaks: Callable[[], int] | None = getattr(g.backend, "graph_breaks", None)
        broken = breaks() if breaks is not None else 0
        return GraphCounters(g.lazy_compiles, g.recompiles, spent, self.warming(), seconds, broken)

    def warming(self) -> Warming | None:
        """Returns the progress of warm-up; None if there is none."""
        return _copy(self.warmup.state) if self.warmup is not None else None

    def plan(self) -> GraphPlan | None:
        """Returns everything for ``GET /buckets``; None on a device without planned buckets."""
        if self.captures is None:
            return None
        ledger = self.captures.ledger
        accounts, budgets = self.captures.own, self.captures.memory_split.pools()
        return GraphPlan(
            version=self.version,
            buckets=[self._state(b) for b in sorted(self.captures.by_bucket)],
            ledger=list(ledger.rows()),
            total=ledger.memory_in_use.total,
            pools={pool: PoolBytes(budgets[pool], accounts.spent[pool], accounts.lost[pool]) for pool in POOLS},
            warmup=self.mode,
            advice=self.advice(),
        )

    def _state(self, bucket: Bucket) -> BucketState:
        assert self.captures is not None
        c = self.captures
        state, cost = self.graphs.state(bucket).name.lower(), c.measured.get(bucket)
        why = c.failed.get(bucket, "") or (self.warmup.broken.get(bucket, "") if self.warmup else "")
        known = cost is not None
        return BucketState(
            str(bucket), bucket.stage.name.lower(), list(bucket.dims), bucket.variant, pool_of(bucket.stage),
            state, c.predict_bytes(bucket) if cost is None else cost, known, why,
        )  # fmt: skip

    def advice(self) -> list[str]:
        """Returns lines about a graph budget that is too small or too large, once the graphs' costs are measured."""
        assert self.captures is not None
        if self.captures.unavailable:
            mode = self.graphs.backend.policy.graphless or "this mode of the device"
            return [f"graphs: none in {mode}; no memory is reserved for them and planned buckets run compiled."]
        if self.warmup is None or self.warmup.state.phase != WARM:
            return []
        return self.captures.advice()


def _copy(state: Warming) -> Warming:
    """Returns a copy that the rank's thread does not change."""
    return Warming(state.phase, state.done, state.total, state.eta, state.seconds, state.last)
