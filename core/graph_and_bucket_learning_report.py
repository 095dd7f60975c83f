"""Report of an engine's plan: its buckets and their graphs, who uses the device's memory, and learned shapes: the sizes
that the engine recorded, the plans proposed for them, and their outcomes.

The values are plain, so that an engine in the same process needs no codec; core/process/engine_messages.py sends them
between processes. Torch-free.

Reasons why a launch had no graph: the ``reason`` label of ``graph_bucket_misses_total``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

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


PUBLISHED, FAILURE, SMALL, UNSTEADY, WORSE, SOON, PROPOSED, REVERTED, HELD = OUTCOMES = (
    "published", "failed", "gain_too_small", "gain_uncertain", "worse_than_static", "too_soon", "proposed", "reverted",
    "held",
)  # fmt: skip
"""Outcomes of a proposed plan: values of the label ``outcome`` of ``bucket_replans_total``."""


class NeedReport(NamedTuple):
    """Needs of one size that were recorded, and how often, older ones counting less."""

    stage: str
    variant: str
    dims: list[int]
    weight: float


class ProposedPlan(NamedTuple):
    """A plan that was found for the recorded needs.

    ``expected`` and ``bound``: what the needs cost in it, and at least in any of as many graphs, over the plan of the
    limits. ``gain``: the share of the present plan's seconds that it saved in later traffic; 0: not judged yet.
    """

    graphs: int
    expected: float
    bound: float
    gain: float
    added: list[str]
    removed: list[str]


class LearnedChange(NamedTuple):
    """A proposal and what became of it; ``seconds`` since the engine's start, ``versions`` of plans."""

    seconds: float
    outcome: str
    version_before: int
    version_after: int
    added: int
    removed: int
    gain: float
    reason: str = ""


@dataclass(slots=True)
class LearningReport:
    """The sizes of an engine's launches, the plan proposed for them and past changes. It holds no text, hash or name
    of a request.
    """

    mode: str = ""
    version: int = 1
    steps: int = 0
    load_seconds: float = 0.0
    cells: int = 0
    histogram: list[NeedReport] = field(default_factory=list)
    """The heaviest cells."""
    proposal: ProposedPlan | None = None
    changes: list[LearnedChange] = field(default_factory=list)
    """The last 32, the oldest first."""
    state: str = "idle"
    handled: int = 0
    """Requests to learn (``POST /buckets/learn``) that have been answered."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """Proposals by what became of them (``OUTCOMES``)."""
    launches: int = 0
    """Launches whose seconds on the device were measured."""
    residuals: dict[str, list[float]] = field(default_factory=dict)
    """Stage -> median and 95th percentile of the relative errors of predicted seconds; empty: too few launches."""


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
