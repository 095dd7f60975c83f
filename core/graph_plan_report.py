"""Report of an engine's plan: its buckets and their graphs, and who uses the device's memory.

The values are plain, so that an engine in the same process needs no codec; core/process/engine_messages.py sends them
between processes. Torch-free.

Reasons why a launch had no graph: the ``reason`` label of ``graph_bucket_misses_total``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.core.shape_learning_report import LearningReport

UNPLANNED = "unplanned"
SKIP = "skip"
WARMING = "warming"
POOL_FULL = "pool_full"
FAILED = "failed"
RELEASED = "released"
EAGER = "eager"
NO_GRAPHS = "no_graphs"
LARGE = "large"

MEANINGS = {
    UNPLANNED: "the need lies above every planned bucket",
    SKIP: "warm-up was skipped and this is the bucket's first use",
    WARMING: "background warm-up has not come to the bucket yet",
    POOL_FULL: "its pool, or the device, cannot pay for the graph",
    FAILED: "its capture or compilation failed, or an earlier start ended in it",
    RELEASED: "the graph was given up when memory ran out",
    EAGER: "--enforce-eager",
    LARGE: "the launch is too large to gain from a graph",
    NO_GRAPHS: "the device has no graphs in this mode",
}


class BucketState(NamedTuple):
    """One planned bucket; ``bytes`` is the cost of its graph, measured or predicted."""

    name: str
    stage: str
    dims: list[int]
    variant: str
    pool: str
    state: str
    bytes: int
    measured: bool = False
    failed: str = ""


class LedgerRow(NamedTuple):
    """One user of device memory, and its bytes."""

    name: str
    bytes: int


class PoolBytes(NamedTuple):
    """Bytes of one graph pool: budget, spent on graphs, and not recovered from released graphs."""

    budget: int
    spent: int
    lost: int


@dataclass(slots=True)
class GraphPlan:
    """Every planned bucket and the use of the device's memory; ledger rows sum to ``total``."""

    version: int
    buckets: list[BucketState] = field(default_factory=list)
    ledger: list[LedgerRow] = field(default_factory=list)
    total: int = 0
    pools: dict[str, PoolBytes] = field(default_factory=dict)
    warmup: str = ""
    advice: list[str] = field(default_factory=list)
    learning: LearningReport | None = None
