"""Buckets and the plan that chooses them. Pure Python: no torch, no numpy.

``Plan.fit`` is the only place where a bucket is chosen; warm-up iterates the same immutable plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from trencadis.core.vision_config import NO_SLOT, SlotForm

DEFAULT_VISION_SLOTS = (256, 576, 1024, 1600, 3136, 4096, 6400, 7744, 9216, 12544)
"""Slots of the default VISION buckets.

Above the last, sizes grow by 1.5 up to the largest need. Each corresponds to a square image of whole windows.
"""

ENCODER_SLOTS = 12544
"""Most slots of a launch that several images share; a larger image gets a launch of its own."""

POOL_ROWS = 512
"""Rows of a POOL launch, unless more requests run at a time.

MEAN pooling sums a prompt's tokens in slices of this size.
"""


@dataclass(frozen=True)
class Density:
    """The density of sizes on an axis with rule ``exp``: ``points`` per octave for sizes up to ``upto``."""

    upto: int
    points: int


LORA = "lora"
"""Variant of text buckets whose rows may have LoRA adapters."""


class Stage(IntEnum):
    """Kinds of launches. A backend's policy lists the stages that it supports and their axes."""

    PREFILL = 1
    DECODE = 2
    FRESH = 3
    CONTEXT = 4
    VISION = 5
    SAMPLE = 6
    RESET = 7
    POOL = 8
    VERIFY = 9


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
    """One planned shape; used as an entry of the warm-up list, a dictionary key and a metric label."""

    stage: Stage
    dims: tuple[int, ...]
    variant: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.dims))
        return f"{self.stage.name.lower()}[{shape}]{'/' + self.variant if self.variant else ''}"


def verify_variant(width: int) -> str:
    """Returns the variant of VERIFY buckets whose rows have up to ``width`` tokens: a last token and its drafts."""
    return f"w{width}"


def verified_width(bucket: Bucket) -> int:
    """Returns the tokens of a row of a VERIFY bucket."""
    return int(target_bucket(bucket).variant.removeprefix("w"))


DRAFT = "draft"
"""End of the variants of buckets that a draft model runs."""


def drafting_bucket(bucket: Bucket) -> Bucket:
    """Returns the bucket of the draft model's launches whose inputs have the sizes of ``bucket``."""
    return replace(bucket, variant=f"{bucket.variant}-{DRAFT}".removeprefix("-"))


def is_drafting(bucket: Bucket) -> bool:
    """Returns True if a draft model runs the bucket."""
    return bucket.variant.endswith(DRAFT)


def target_bucket(bucket: Bucket) -> Bucket:
    """Returns the bucket without the mark of a draft model; its inputs have the same sizes."""
    return replace(bucket, variant=bucket.variant.removesuffix(DRAFT).removesuffix("-"))


AHEAD = "ahead"


def ahead_variant(drafts: int) -> str:
    """Returns the variant of SAMPLE whose rows have penalties and up to ``drafts`` drafts before them."""
    return f"{AHEAD}{drafts}"


def drafts_ahead(bucket: Bucket) -> int:
    """Returns the columns of ``HeadInputs.ahead`` in a SAMPLE bucket; 0: it has none."""
    return int(bucket.variant.removeprefix(AHEAD)) if bucket.variant.startswith(AHEAD) else 0


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
        coarsest: 0: every size is kept. Otherwise sizes that save less than ``Policy.tolerance`` are dropped, as long
            as no need is padded to more than this many times its size.
    """

    minimum: int = 1
    step: int = 1
    density: tuple[Density, ...] = ()
    coarsest: int = 0


SMALLEST, LARGEST = "smallest", "largest"
"""Corners of a cell: just above the lower neighbour, or the bucket itself."""


@dataclass(frozen=True)
class InputSizes:
    """Everything besides the bucket that determines the sizes of its input tensors.

    Args:
        row_blocks: KV blocks of the longest row that the backend supports.
        kv_heads: KV heads of one rank.
        group: query heads per KV head.
        slot: the form of a VISION launch's slots.
        upto: text launches have ``Attn.upto``.
        windows: some layers have a sliding window.
        head_dim: size of a head.
        recurrent: text launches have ``TextTensors.recurrent``.
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
    recurrent: bool = False


@dataclass(frozen=True)
class GraphMemory:
    """Memory that captured graphs keep on a device.

    Args:
        cached: they keep every tensor passed from one recipe to the next; False: outputs only.
        cut_layers: layers between two cuts of a graph; 0: graphs are cut before collectives only.
        library: bytes of workspace of the matrix-product library, shared by the graphs of a stage.
    """

    cached: bool = True
    cut_layers: int = 1
    library: int = 0

    def cuts(self, layers: int) -> int:
        """Returns the number of cuts of a graph of ``layers`` layers."""
        return layers // self.cut_layers if self.cut_layers else 0


class DecodedPieces(NamedTuple):
    """Pieces of quantised weights that a device decodes once for many rows.

    Args:
        rows: fewest rows of such a launch; 0: none.
        bytes: most bytes of a piece, which such a launch takes beside its activations.
    """

    rows: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Policy:
    """A backend's capabilities as data, which the planner and the launch splitter read.

    Args:
        axes: names of each stage's axes.
        alignment: per stage and axis, the unit to round up to if the axis has no list of sizes.
        boundaries: per stage and axis, ascending sizes to choose from; an empty tuple means alignment alone.
        mixed: prefill and decode rows share one ragged launch; False: rectangular launches, split by cost.
        depth: steps in flight besides the one being scheduled.
        flat_kv: a layer's cache has the shape [blocks x block_size, KV heads, head_dim], because a compiler's
            functionalised graph can only write in place to a base tensor, not to a view.
        overlaps: a thread other than the launching one may wait for results.
        block_sizes: KV block sizes that the device supports, the default first.
        captures: whether programs can be captured as graphs.
        graphless: name of the mode in which a device that can capture runs without graphs, for messages; empty: it has
            graphs.
        compiled: (buckets, slots of a row of an image, layers, kinds of layers) -> a line for users about what such a
            mode compiles; None: there is nothing to say.
        cost: cost of a bucket as a polynomial of its sizes; ``Plan.fit`` takes the cheapest bucket.
        rules: per stage, how the planner fills each axis; empty: no plan, needs are rounded up to the alignment. FRESH
            has a third rule, for the tokens of rows that share a launch.
        corners: per stage and axis, the corner of a bucket's cell; a bucket is kept only if needs at this corner can
            occur.
        fresh_tokens: FRESH: most tokens of a row in a launch that several rows share.
        merge_tokens: FRESH: most padded tokens of such a launch; above it, separate launches cost the same.
        tolerance: fraction of a launch's cost that a size must save to be kept, on axes with ``AxisRule.coarsest``.
        context_tokens: CONTEXT: most tokens of a launch.
        decode_blocks: DECODE: most blocks of a launch, unless one full-length row needs more.
        max_buckets: most buckets of a plan whose axes the user did not set; 0: no limit.
        capture_order: ``descending``: largest first; ``strategy``: in the order in which the budget selects them.
        capture_limit: per stage, the most padded tokens of a launch that is captured. Larger launches run so long that
            their launch overhead is negligible; their buckets are only compiled.
        capture_operations: operations of a prompt's products up to which it is captured in any case: the tokens of
            ``capture_limit`` take a small model less time than their launches take the host. 0: that limit alone.
        utilisation_of: the memory that `--gpu-memory-utilization` is a fraction of: ``free`` (after profiling) or
            ``total``.
        pool_cost: how graphs of a stage share workspaces: ``sum``: each has its own; ``max``: all share the largest.
        graph_memory: what graphs keep in memory if they do not share workspaces.
        encoder_slots: most slots of a VISION launch of several images; one image may need more.
        decoded: pieces of quantised weights that are decoded once for many rows.
        ridge: operations that the device computes in the time to read one byte; 0: unknown.
        inputs: exact bytes of a bucket's input tensors; None: a formula estimates them.
        invariant_rows: the unit that row counts are padded to so that a row's bits do not depend on the others
            (`--batch-invariant`); 0: the device cannot guarantee that.
        quantised: the form in which quantised weights are kept (core/quant/scheme.py); empty: they are dequantised
            while loading.
        host_kv: evicted KV blocks can go to host memory. The backend is a ``CopyingBackend``
            (core/launches/host_block_copies.py).
        host_blocks: numbers of such blocks that one launch gathers or scatters, ascending; the backend is then a
            ``PlanningBackend``. Empty: copies need no launches and no memory of their own.
        host_weights: the weights of some layers can lie in host memory, and be copied within launches
            (`--cpu-offload-gb`). The backend is ``core.models.interface.HostLayering``.
        kv_codes: supported forms of an 8-bit KV cache (core/kv_cache_format.py) -> the torch dtype of their codes
            on this device; empty: none.
        aligned: the unit that widths of matrix products are padded to with zeros while weights load. 1: no width is
            changed.
        masked_head: SAMPLE has a third variant, ``masked``, which returns only the best id that a row's mask allows.
            The backend's ops are ``core.models.interface.MaskingOps``.
        best_head: the argmax of a row can be computed without storing the logits. The backend's ops are
            ``core.models.interface.BestOps``.
        split_head: greedy rows get a SAMPLE launch of their own if other rows, which cost many times as much, are in
            the step.
        drawn_head: SAMPLE has a variant ``draw``, which samples by all parameters but returns no log-probabilities. The
            backend's ops are ``core.models.interface.DrawingOps``.
        penalised_head: SAMPLE has a variant ``penalised``, which returns only the best id after penalties, bias and
            mask. The backend's ops are ``core.models.interface.PenalisingOps``.
        attention: optional attention libraries (`--attention-backend`) -> the bytes of workspace that they need in
            addition to a bucket's inputs; launches of a stage share the workspace as they share inputs.
        windows: ``Ops.attend`` accepts a window.
        upto: text launches have ``Attn.upto`` if ``BackendConfig.upto`` is set.
        sinks: ``Ops.attend`` accepts sinks.
        encoder_data_parallel: each rank may hold the whole vision tower and gather arena rows from the others
            (core/launches/encoder_data_parallel.py).
        cross_attention: text launches have ``TextTensors.cross_attention`` for layers that attend to images.
        cross_attention_bytes: bytes of workspace of that attention; None: it gathers the rows
            (core/memory/launch_memory.py).
        recurrent: text launches have ``TextTensors.recurrent`` if ``BackendConfig.recurrent`` is set, and the backend's
            ops are ``core.models.interface.RecurrentOps``.
        drafts: rows of decoding sequences may have several tokens, and SAMPLE reads ``HeadInputs.ahead``, so that
            drafts can be verified (core/spec). A device with planned shapes has the stage VERIFY for them.
        copies_whole: only whole tensors are copied to the device outside of launches: a part would be a program.
        adapters: text buckets have the variant ``LORA``, whose launches have ``TextTensors.adapter``.
        stages: the backend has a ``pipe`` (core/launches/stage_transfer.py) if ``BackendConfig.stages`` is above 1.
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
    compiled: Callable[[Sequence[Bucket], int, int, int], str] | None = None
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
    capture_operations: float = 0.0
    utilisation_of: str = "free"
    pool_cost: str = "sum"
    graph_memory: GraphMemory = GraphMemory()
    encoder_slots: int = ENCODER_SLOTS
    ridge: float = 0.0
    inputs: Callable[[Bucket, InputSizes], int] | None = None
    invariant_rows: int = 0
    quantised: str = ""
    decoded: DecodedPieces = DecodedPieces()
    host_kv: bool = False
    host_blocks: tuple[int, ...] = ()
    host_weights: bool = False
    kv_codes: Mapping[str, str] = field(default_factory=dict)
    aligned: int = 1
    masked_head: bool = False
    best_head: bool = False
    split_head: bool = False
    drawn_head: bool = False
    drafts: bool = False
    adapters: bool = False
    copies_whole: bool = False
    penalised_head: bool = False
    attention: Mapping[str, Callable[[Bucket, InputSizes], int]] = field(default_factory=dict)
    windows: bool = False
    upto: bool = False
    sinks: bool = False
    encoder_data_parallel: bool = False
    cross_attention: bool = False
    cross_attention_bytes: Callable[[Bucket, InputSizes], int] | None = None
    stages: bool = False
    recurrent: bool = False


def escape(need: int, unit: int = 1) -> int:
    """Returns the size for a need above every boundary: the next multiple of 1/8 of its leading power of two.

    This limits the number of such shapes. The result is divisible by ``unit``.
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
        whole: prompts are never cut into chunks, because all their tokens attend to each other.
        units: images in the arena that tokens of one launch may attend to; 0: there is no cross-attention, or any
            number is a valid size.
        drafts: most drafts of a row of VERIFY; 0: there is no such stage.
    """

    policy: Policy
    version: int = 1
    buckets: tuple[Bucket, ...] = ()
    block_size: int = 0
    notes: tuple[str, ...] = ()
    whole: bool = False
    units: int = 0
    drafts: int = 0

    @cached_property
    def _tables(self) -> dict[tuple[Stage, str], BucketTable]:
        lists: dict[tuple[Stage, str], list[Bucket]] = {}
        for bucket in self.buckets:
            lists.setdefault((bucket.stage, bucket.variant), []).append(bucket)
        return {key: BucketTable(found, self.policy.cost) for key, found in lists.items()}

    def of(self, stage: Stage) -> tuple[Bucket, ...]:
        """Returns the planned buckets of one stage, ascending."""
        return tuple(sorted(b for b in self.buckets if b.stage is stage))

    def find(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> Bucket | None:
        """Returns the cheapest planned bucket that holds ``needs``; None if there is none."""
        table = self._tables.get((stage, variant))
        return None if table is None else table.find(needs)

    def table(self, stage: Stage, variant: str = "") -> BucketTable | None:
        """Returns the lookup table of one stage, for callers with thousands of needs; None if nothing is planned."""
        return self._tables.get((stage, variant))

    def sizes(self, stage: Stage, axis: int = 0) -> tuple[int, ...]:
        """Returns the sizes of one axis over the planned buckets of a stage, ascending."""
        table = next((t for (s, _), t in self._tables.items() if s is stage), None)
        return () if table is None else tuple(table.axes[axis])

    def fit(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> Bucket:
        """Returns the bucket for ``needs``, one need per axis of the stage; the result does not depend on what is
        captured.
        """
        table = self._tables.get((stage, variant))
        if table is not None:
            return table.find(needs) or self._escape(stage, needs, variant, table)
        return self._rounded(stage, needs, variant)

    @cached_property
    def _rounded(self) -> Callable[[Stage, tuple[int, ...], str], Bucket]:
        """``_round`` with a cache, since decoding asks for the same bucket in each step."""
        return lru_cache(maxsize=256)(self._round)

    def _round(self, stage: Stage, needs: tuple[int, ...], variant: str) -> Bucket:
        """Returns the bucket of a stage without a plan: needs rounded to alignment and boundaries."""
        axes = self.policy.axes[stage]
        if len(needs) != len(axes):
            raise ValueError(f"{stage.name} has axes {axes}, got needs {needs}")
        units, lists = self.policy.alignment[stage], self.policy.boundaries.get(stage, ((),) * len(axes))
        dims = tuple(_fit_axis(max(n, 1), a, b) for n, a, b in zip(needs, units, lists, strict=True))
        return Bucket(stage, dims, variant)

    def _escape(self, stage: Stage, needs: tuple[int, ...], variant: str, table: BucketTable) -> Bucket:
        """Returns a bucket for needs above all planned ones."""
        unit = self.policy.alignment[stage]
        dims = tuple(_fit_axis(max(n, 1), a, tuple(s)) for n, a, s in zip(needs, unit, table.axes, strict=True))
        return Bucket(stage, dims, variant)

    def is_within_boundaries(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> bool:
        """Returns True if no need lies above the stage's boundaries, i.e. no escape shape is necessary."""
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
        """Returns (cost, bucket) of the cell; None if a need lies above the list."""
        row = self._rows[bisect_left(self.axes[0], needs[0])]
        return row[0] if self._flat else row[bisect_left(self.axes[1], needs[1])]

    def find(self, needs: tuple[int, ...]) -> Bucket | None:
        """Returns the cell's bucket; None if a need lies above the list."""
        found = self.find_with_cost(needs)
        return None if found is None else found[1]


def _cheapest(*found: tuple[float, Bucket] | None) -> tuple[float, Bucket] | None:
    return min((c for c in found if c is not None), key=lambda c: (c[0], c[1].dims), default=None)


def _fit_axis(need: int, alignment: int, boundaries: tuple[int, ...]) -> int:
    return _fit_listed_size(need, alignment, boundaries) if boundaries else -(-need // alignment) * alignment


def _fit_listed_size(need: int, alignment: int, boundaries: tuple[int, ...]) -> int:
    """Returns the size for ``need`` on an axis with a list of sizes."""
    i = bisect_left(boundaries, need)
    return boundaries[i] if i < len(boundaries) else escape(need, alignment)


def capturable(policy: Policy, bucket: Bucket) -> bool:
    """Returns True if a launch of ``bucket`` is small enough to gain from a graph."""
    limit = policy.capture_limit.get(bucket.stage)
    return limit is None or padded_tokens(bucket) <= limit


def padded_tokens(bucket: Bucket) -> int:
    """Returns the text tokens, slots or rows that a launch of ``bucket`` computes, padding included."""
    if bucket.stage is Stage.VERIFY:
        return bucket.dims[0] * verified_width(bucket)
    return bucket.dims[0] * bucket.dims[1] if bucket.stage is Stage.FRESH else bucket.dims[0]
