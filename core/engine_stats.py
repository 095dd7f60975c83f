"""Reports of an engine: its sizes, its plan, its launches, its counters.

The values are plain, so that an engine in the same process needs no codec; core/process/engine_messages.py sends them
between processes. Torch-free.

Reasons why a launch had no graph: the ``reason`` label of ``graph_bucket_misses_total``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.core.startup_progress_and_warmup_pacing import Warming

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


PUBLISHED, FAILURE, SMALL, UNSTEADY, WORSE, SOON, PROPOSED, REVERTED, HELD = OUTCOMES = (
    "published", "failed", "gain_too_small", "gain_uncertain", "worse_than_static", "too_soon", "proposed", "reverted",
    "held",
)  # fmt: skip
"""What became of proposed shapes: the ``outcome`` label of ``bucket_replans_total``."""


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
    """What an engine has learned about the shapes of its traffic. Sizes only: no text, hash or name of a request."""

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


@dataclass(slots=True)
class GraphCounters:
    """Counters of graphs since the engine's start."""

    lazy_compiles: int = 0
    recompiles: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    warming: Warming | None = None
    capture_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent on captures, by stage."""
    graph_breaks: int = 0
    """Parts of launches that are compiled with graph breaks, because the compiler could not trace them."""


class BucketUse(NamedTuple):
    """One launch: real and padded tokens, slots or rows; the other fields are those of ``StepStats``."""

    stage: str
    real: int
    padded: int
    seconds: float
    bucket: str = ""
    state: str = ""
    planned: bool = True
    miss: str = ""
    items: int = 0
    needed: int = 0


@dataclass(slots=True)
class EngineInfo:
    """The sizes that an engine started with."""

    device: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    arena_rows: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    arena_bytes: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    """Predicted duration of the largest step; 0: unknown. A step that takes far longer counts as a hang."""
    notes: list[str] = field(default_factory=list)
    graphs: GraphPlan | None = None
    host_blocks: int = 0
    """KV blocks in host memory for those evicted from the device."""
    snapshots: int = 0
    """Most snapshots of recurrent state at a time, of ``snapshot_bytes`` each; 0 bytes: the model has no such state."""
    snapshot_bytes: int = 0


@dataclass(slots=True)
class EngineStats:
    """Counters and gauges of the engine, cumulative since its start."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    """Requests among ``waiting`` that wait for a grammar or for images rather than for KV blocks."""
    kv_used: int = 0
    kv_total: int = 0
    kv_cached: int = 0
    """Blocks in the prefix cache, whether in use or not."""
    kv_evictions: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    """Tokens of finished prompts, whether cached or computed."""
    prompt_cached: int = 0
    """Tokens among ``prompt_tokens`` found in the prefix cache."""
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    host_hits: int = 0
    """Tokens among ``prefix_hits`` that were copied back from host memory."""
    host_used: int = 0
    host_total: int = 0
    """KV blocks that host memory can hold."""
    snapshot_hits: int = 0
    """Requests that began with a snapshot of recurrent state."""
    snapshot_misses: int = 0
    snapshot_evictions: int = 0
    snapshots: int = 0
    states_kept: int = 0
    """Recurrent states of preempted sequences that were copied to host memory; ``states_resumed``: and back."""
    states_resumed: int = 0
    mm_queries: int = 0
    mm_hits: int = 0
    spec_drafts: int = 0
    """Drafts of sequences that steps have verified; they held ``spec_draft_tokens`` ids."""
    spec_draft_tokens: int = 0
    spec_accepted: int = 0
    spec_accepted_at: list[int] = field(default_factory=list)
    """Accepted ids by their place in the draft."""
    cpu_threads: int = 0
    """Threads of rank 0 that currently compute on the CPU; 0: another device computes."""
    running_adapters: list[str] = field(default_factory=list)
    """Names of the adapters that running requests use."""
    waiting_adapters: list[str] = field(default_factory=list)
    arena_used: int = 0
    arena_total: int = 0
    images_encoded: int = 0
    image_evictions: int = 0
    evicted_blocks: bytes = b""
    """Keys of blocks evicted since the last message, 8 bytes each, where the engine is one of several."""
    evicted_images: bytes = b""
    step_tokens: list[int] = field(default_factory=list)
    """Tokens of each step since the last message."""
    buckets: list[BucketUse] = field(default_factory=list)
    """Each launch since the last message."""
    graphs: GraphCounters = field(default_factory=GraphCounters)
    plan: GraphPlan | None = None
    """The plan, if a state changed since the last message."""
