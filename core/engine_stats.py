"""Statistics of an engine: the sizes that it started with, its launches, its counters.

The values are plain, so that an engine in the same process needs no codec; core/process/engine_messages.py sends them
between processes. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.core.graph_and_bucket_learning_report import GraphPlan
from trencadis.core.startup_progress_and_warmup_pacing import Warming


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
