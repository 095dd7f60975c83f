"""Buckets and the plan that chooses them. Pure Python: no torch, no numpy.

``Plan.fit`` is the only place where a bucket is chosen; warm-up iterates the same immutable plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache

from trencadis.core.checkpoint.vision_config import NO_SLOT, SlotForm

DEFAULT_VISION_SLOTS = (256, 576, 1024, 1600, 3136, 4096, 6400, 7744, 9216, 12544)
"""Slots of the default VISION buckets; above them the list grows by 1.5 to the largest need. Their images are squares
of whole windows."""

ENCODER_SLOTS = 12544
"""Slots that the images of one launch share; a larger image has a launch of its own."""

POOL_ROWS = 512
"""Rows of a POOL launch, unless more requests run at a time: a prompt's mean takes its tokens in slices of so many."""


@dataclass(frozen=True)
class Density:
    """Points per octave of ``exp``: ``points`` up to a size of ``upto``."""

    upto: int
    points: int


class Stage(IntEnum):
    """Kinds of launches. A backend's policy names the stages that it has and their axes."""

    PREFILL = 1
    DECODE = 2
    FRESH = 3
    CONTEXT = 4
    VISION = 5
    SAMPLE = 6
    RESET = 7
    POOL = 8


MIXED_AXES = {
    Stage.PREFILL: ("tokens", "rows"),
    Stage.DECODE: ("rows",),
    Stage.VISION: ("slots",),
    Stage.SAMPLE: ("rows",),
    Stage.RESET: ("rows",),
    Stage.POOL: ("rows",),
}
"""Axes of each stage on devices whose ragged launches mix prefill and decode rows."""


@dataclass(frozen=True, order=True)
class Bucket:
    """One planned shape: an entry of the warm-up list, a dictionary key and a metric label."""

    stage: Stage
    dims: tuple[int, ...]
    variant: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.dims))
        return f"{self.stage.name.lower()}[{shape}]{'/' + self.variant if self.variant else ''}"


def _unit_cost(bucket: Bucket) -> float:
    cost = 1.0
    for d in bucket.dims:
        cost *= d
    return cost


@dataclass(frozen=True)
class AxisRule:
    """How a planned axis is filled by default.

    Args:
        minimum: smallest size.
        step: the unit that sizes are rounded up to.
        density: points per octave by size.
        coarsest: 0: every size is kept; else sizes that save less than ``Policy.tolerance`` are left out, while no need
            is padded to more than this many times its size.
    """

    minimum: int = 1
    step: int = 1
    density: tuple[Density, ...] = ()
    coarsest: int = 0


SMALLEST, LARGEST = "smallest", "largest"
"""Corners of a cell: just above the lower neighbour, or the bucket itself."""


@dataclass(frozen=True)
class InputSizes:
    """What the sizes of a bucket's input tensors depend on beside the bucket.

    Args:
        row_blocks: KV blocks of the longest row that a backend allows for.
        kv_heads: KV heads of one rank.
        group: query heads of a KV head.
        slot: of a VISION launch.
        upto: text launches have ``Attn.upto``.
        windows: some layers see a window of keys.
        head_dim: values of a head.
    """

    vocab: int
    block_size: int = 16
    row_blocks: int = 1
    kv_heads: int = 1
    slot: SlotForm = NO_SLOT
    upto: bool = False
    windows: bool = False
    group: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class GraphMemory:
    """What graphs of a device keep.

    Args:
        cached: every tensor that goes from one recipe to the next; False: outputs alone.
        cut_layers: layers between two cuts of a graph; 0: graphs are cut before collectives alone.
        library: bytes that a library's products work in, for the graphs of each stage that share their workspace.
    """

    cached: bool = True
    cut_layers: int = 1
    library: int = 0

    def cuts(self, layers: int) -> int:
        """Cuts of a graph of ``layers``."""
        return layers // self.cut_layers if self.cut_layers else 0


@dataclass(frozen=True)
class Policy:
    """A backend's capabilities as data, which the planner and the launch splitter read.

    Args:
        axes: names of each stage's axes.
        alignment: per stage, the unit that each axis is rounded up to if it has no list of sizes.
        boundaries: per stage and axis, ascending sizes to choose from; an empty tuple means alignment alone.
        mixed: prefill and decode rows share one ragged launch; False: rectangular launches, split by cost.
        depth: steps in flight beyond the one being scheduled.
        flat_kv: a layer's cache is [blocks x block_size, KV heads, head_dim]: what a compiler's functionalised graph
            writes in place must be a base tensor and no view.
        overlaps: another thread than the one that launches may wait for results.
        block_sizes: KV block sizes that the device supports, the default first.
        captures: whether programs can be captured as graphs.
        graphless: the mode in which a device that captures has no graphs, as users are told; empty: it has them.
        cost: a pure polynomial of the bucket; ``Plan.fit`` takes the cheapest bucket.
        rules: per stage, how the planner fills each axis; empty: nothing is planned, needs are rounded by alignment.
            FRESH has a third rule: the tokens of rows that share a launch.
        corners: per stage and axis, the corner of a bucket's cell that must be able to occur for it to be kept.
        fresh_tokens: FRESH: most tokens of a row that shares its launch.
        merge_tokens: FRESH: most padded tokens of a launch that rows share; above it, separate launches cost the same.
        tolerance: share of a launch's cost that a size must save to be kept, on axes that may be coarse.
        context_tokens: CONTEXT: most tokens of a launch.
        decode_blocks: DECODE: most blocks of a launch, unless one full-length row needs more.
        max_buckets: most buckets of a plan whose axes the user did not set; 0: no limit.
        capture_order: ``descending``: largest first; ``strategy``: in the order in which the budget selects them.
        capture_limit: per stage, the most padded tokens of a launch that is captured; a larger one runs so long that
            its launch overhead does not count, so that its bucket is only compiled.
        utilisation_of: what `--gpu-memory-utilization` is a share of: ``free`` memory after profiling, or ``total``.
        pool_cost: how graphs of a stage share workspaces: ``sum``: not at all; ``max``: all of them share the largest.
        graph_memory: what graphs keep, where they do not share workspaces.
        encoder_slots: most slots of a VISION launch of several images; one image may need more.
        ridge: operations that the device computes while it reads one byte; 0: unknown.
        inputs: exact bytes of a bucket's input tensors; None: a formula estimates them.
        invariant_rows: the unit that row counts are padded to so that a row's bits do not depend on the others
            (`--batch-invariant`); 0: the device cannot guarantee that.
        quantised: the form in which quantised weights are kept (core/quant/scheme.py); empty: dequantised as they load.
        host_kv: evicted KV blocks can go to host memory; the backend is a ``host_block_copies.CopyingBackend``.
        host_blocks: how many of them one launch gathers or scatters, ascending; the backend is a ``PlanningBackend``
            there. Empty: copies need no launches, and no memory of their own.
        host_weights: the weights of some layers can lie in host memory, and be copied within launches
            (`--cpu-offload-gb`). The backend is ``core.models.interface.HostLayering``.
        kv_codes: forms of an 8-bit KV cache (core/quant/kv_cache_format.py) -> the torch type of their codes here;
            empty: none.
        aligned: values of which the widths of products are multiples where ranks or models cut them otherwise; zeros
            fill them as weights are loaded. 1: no width is changed.
        masked_head: SAMPLE has a third variant, ``masked``: the best id that a row's mask allows, and nothing else. Its
            backend's ops are ``core.models.interface.MaskingOps``.
        best_head: the best of a row's logits may be found without them. Its backend's ops are
            ``core.models.interface.BestOps``.
        split_head: rows that take the argmax have a SAMPLE of their own beside others, which cost many times as much.
        drawn_head: SAMPLE has a variant ``draw``: a token by all parameters, and no log-probabilities. Its backend's
            ops are ``core.models.interface.DrawingOps``.
        attention: libraries that attend where they are installed and asked for (`--attention-backend`) -> the bytes
            that they work in beside a bucket's inputs; launches of a stage share them as they share inputs.
        windows: ``Ops.attend`` takes a window.
        upto: text launches have ``Attn.upto`` where ``BackendConfig.upto`` asks for it.
        encoder_data_parallel: its ranks may each hold the vision tower and gather rows of the arena
        (core/launches/encoder_data_parallel.py).
        cross_attention: text launches have ``TextTensors.cross_attention`` where layers attend to images.
        cross_attention_bytes: bytes that attention to them works in; None: it gathers
        (core/memory/cross_attention_memory.py).
        stages: its backend has a ``pipe`` (core/launches/stage_transfer.py) where ``BackendConfig.stages`` asks for
        several.
    """

    axes: Mapping[Stage, tuple[str, ...]]
    alignment: Mapping[Stage, tuple[int, ...]]
    boundaries: Mapping[Stage, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    mixed: bool = True
    depth: int = 0
    flat_kv: bool = False
    overlaps: bool = False
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    captures: bool = False
    graphless: str = ""
    cost: Callable[[Bucket], float] = _unit_cost
    rules: Mapping[Stage, tuple[AxisRule, ...]] = field(default_factory=dict)
    corners: Mapping[Stage, tuple[str, ...]] = field(default_factory=dict)
    fresh_tokens: int = 1024
    merge_tokens: int = 4096
    tolerance: float = 0.2
    context_tokens: int = 2048
    decode_blocks: int = 4096
    max_buckets: int = 0
    capture_order: str = "strategy"
    capture_limit: Mapping[Stage, int] = field(default_factory=dict)
    utilisation_of: str = "free"
    pool_cost: str = "sum"
    graph_memory: GraphMemory = GraphMemory()
    encoder_slots: int = ENCODER_SLOTS
    ridge: float = 0.0
    inputs: Callable[[Bucket, InputSizes], int] | None = None
    invariant_rows: int = 0
    quantised: str = ""
    host_kv: bool = False
    host_blocks: tuple[int, ...] = ()
    host_weights: bool = False
    kv_codes: Mapping[str, str] = field(default_factory=dict)
    aligned: int = 1
    masked_head: bool = False
    best_head: bool = False
    split_head: bool = False
    drawn_head: bool = False
    attention: Mapping[str, Callable[[Bucket, InputSizes], int]] = field(default_factory=dict)
    windows: bool = False
    upto: bool = False
    encoder_data_parallel: bool = False
    cross_attention: bool = False
    cross_attention_bytes: Callable[[Bucket, InputSizes], int] | None = None
    stages: bool = False


def escape(need: int, unit: int = 1) -> int:
    """The size for a need above every boundary: the next multiple of 1/8 of its leading power of two.

    So only few such shapes can arise. The result is divisible by ``unit``.
    """
    step = max(unit, (1 << (need.bit_length() - 1)) // 8)
    step = -(-step // unit) * unit
    return -(-need // step) * step


@dataclass(frozen=True)
class Plan:
    """The shapes of one engine, immutable and versioned. ``fit`` maps needs to the cheapest bucket that holds them.

    Args:
        buckets: every planned bucket; needs of other stages are rounded by the policy's alignment and boundaries.
        block_size: tokens of a KV block (0: the policy has no axis of blocks).
        notes: lines about what the planner changed or dropped.
        whole: no prompt is cut, because its tokens attend to each other.
        units: images of the arena that tokens of one launch may attend to; 0: none does, or every number is a size.
    """

    policy: Policy
    version: int = 1
    buckets: tuple[Bucket, ...] = ()
    block_size: int = 0
    notes: tuple[str, ...] = ()
    whole: bool = False
    units: int = 0

    @cached_property
    def _tables(self) -> dict[tuple[Stage, str], BucketTable]:
        lists: dict[tuple[Stage, str], list[Bucket]] = {}
        for bucket in self.buckets:
            lists.setdefault((bucket.stage, bucket.variant), []).append(bucket)
        return {key: BucketTable(found, self.policy.cost) for key, found in lists.items()}

    def of(self, stage: Stage) -> tuple[Bucket, ...]:
        """The planned buckets of one stage, ascending."""
        return tuple(sorted(b for b in self.buckets if b.stage is stage))

    def find(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> Bucket | None:
        """The cheapest planned bucket that holds ``needs``; None if there is none."""
        table = self._tables.get((stage, variant))
        return None if table is None else table.find(needs)

    def table(self, stage: Stage, variant: str = "") -> BucketTable | None:
        """The lookup table of one stage, for callers with thousands of needs; None if nothing is planned."""
        return self._tables.get((stage, variant))

    def sizes(self, stage: Stage, axis: int = 0) -> tuple[int, ...]:
        """The sizes of one axis over the planned buckets of a stage, ascending."""
        table = next((t for (s, _), t in self._tables.items() if s is stage), None)
        return () if table is None else tuple(table.axes[axis])

    def fit(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> Bucket:
        """The bucket for ``needs``, one need per axis of the stage; it does not depend on what is captured."""
        table = self._tables.get((stage, variant))
        if table is not None:
            return table.find(needs) or self._escape(stage, needs, variant, table)
        return self._rounded(stage, needs, variant)

    @cached_property
    def _rounded(self) -> Callable[[Stage, tuple[int, ...], str], Bucket]:
        """``_round``, remembered: decoding asks for the same bucket in each step."""
        return lru_cache(maxsize=256)(self._round)

    def _round(self, stage: Stage, needs: tuple[int, ...], variant: str) -> Bucket:
        """The bucket of a stage without a plan."""
        axes = self.policy.axes[stage]
        if len(needs) != len(axes):
            raise ValueError(f"{stage.name} has axes {axes}, got needs {needs}")
        units, lists = self.policy.alignment[stage], self.policy.boundaries.get(stage, ((),) * len(axes))
        dims = tuple(_fit_axis(max(n, 1), a, b) for n, a, b in zip(needs, units, lists, strict=True))
        return Bucket(stage, dims, variant)

    def _escape(self, stage: Stage, needs: tuple[int, ...], variant: str, table: BucketTable) -> Bucket:
        """A bucket for needs above those that are planned."""
        unit = self.policy.alignment[stage]
        dims = tuple(_fit_axis(max(n, 1), a, tuple(s)) for n, a, s in zip(needs, unit, table.axes, strict=True))
        return Bucket(stage, dims, variant)

    def is_within_boundaries(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> bool:
        """Whether no need lies above the stage's boundaries, which would take an escape shape."""
        if (stage, variant) in self._tables:
            return self.find(stage, needs, variant) is not None
        lists = self.policy.boundaries.get(stage, ())
        return all(not b or n <= b[-1] for n, b in zip(needs, lists, strict=False))


class BucketTable:
    """The cheapest bucket for every cell of one stage, computed once; a lookup is one bisection per axis."""

    def __init__(self, buckets: list[Bucket], cost: Callable[[Bucket], float]) -> None:
        self.axes = [sorted(set(sizes)) for sizes in zip(*(b.dims for b in buckets), strict=True)]
        self._flat = len(self.axes) == 1
        columns = self.axes[1] if len(self.axes) > 1 else [0]
        own = {b.dims: (cost(b), b) for b in buckets}
        width = len(columns)
        rows: list[list[tuple[float, Bucket] | None]] = [[None] * (width + 1) for _ in range(len(self.axes[0]) + 1)]
        for i in reversed(range(len(self.axes[0]))):
            for j in reversed(range(width)):
                dims = (self.axes[0][i],) if self._flat else (self.axes[0][i], columns[j])
                rows[i][j] = _cheapest(own.get(dims), rows[i + 1][j], rows[i][j + 1])
        self._rows = rows

    def find_with_cost(self, needs: tuple[int, ...]) -> tuple[float, Bucket] | None:
        """The cell's bucket and its cost; None above the list."""
        row = self._rows[bisect_left(self.axes[0], needs[0])]
        return row[0] if self._flat else row[bisect_left(self.axes[1], needs[1])]

    def find(self, needs: tuple[int, ...]) -> Bucket | None:
        """The cell's bucket; None above the list."""
        found = self.find_with_cost(needs)
        return None if found is None else found[1]


def _cheapest(*found: tuple[float, Bucket] | None) -> tuple[float, Bucket] | None:
    return min((c for c in found if c is not None), key=lambda c: (c[0], c[1].dims), default=None)


def _fit_axis(need: int, alignment: int, boundaries: tuple[int, ...]) -> int:
    return _fit_listed_size(need, alignment, boundaries) if boundaries else -(-need // alignment) * alignment


def _fit_listed_size(need: int, alignment: int, boundaries: tuple[int, ...]) -> int:
    """The size for ``need`` on an axis that has a list of sizes."""
    i = bisect_left(boundaries, need)
    return boundaries[i] if i < len(boundaries) else escape(need, alignment)


def capturable(policy: Policy, bucket: Bucket) -> bool:
    """Whether a launch of ``bucket`` is small enough to gain from a graph."""
    limit = policy.capture_limit.get(bucket.stage)
    return limit is None or padded_tokens(bucket) <= limit


def padded_tokens(bucket: Bucket) -> int:
    """Text tokens, slots or rows that a launch of ``bucket`` computes, padding included."""
    return bucket.dims[0] * bucket.dims[1] if bucket.stage is Stage.FRESH else bucket.dims[0]
