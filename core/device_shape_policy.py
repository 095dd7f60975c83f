"""Describes a device to the planner: its abilities and the rules of its shapes. Pure Python: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.core.buckets import ENCODER_SLOTS, Bucket, Stage, padded_tokens
from trencadis.core.vision_config import NO_SLOT, SlotForm, VisionLaunchParts


@dataclass(frozen=True)
class Density:
    """The density of sizes on an axis with rule ``exp``: ``points`` per octave for sizes up to ``upto``."""

    upto: int
    points: int


def _unit_cost(bucket: Bucket) -> float:
    cost = 1.0
    for d in bucket.dims:
        cost *= d
    return cost


def no_bytes(ranks: int) -> int:
    """Returns 0: sums over ranks take no memory of their own."""
    return 0


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
        outputs_apart: SAMPLE writes its outputs to tensors outside its graph, which are counted with its inputs.
    """

    cached: bool = True
    cut_layers: int = 1
    library: int = 0
    outputs_apart: bool = False

    def cuts(self, layers: int) -> int:
        """Returns the number of cuts of a graph of ``layers`` layers."""
        return layers // self.cut_layers if self.cut_layers else 0


class PlannedLayer(NamedTuple):
    """Keys of a decoder layer that are equal for layers which can share compiled functions.

    Args:
        kind: equal for layers of equal parts and sizes.
        inputs: equal for layers that take the same rotary factors and attention inputs.
        recurrent: True if it keeps a state of fixed size for each sequence.
        sees: True if it attends to images, and is left out of launches without any.
    """

    kind: Hashable = None
    inputs: Hashable = None
    recurrent: bool = False
    sees: bool = False


class PlannedModel(NamedTuple):
    """The launches of one model of a plan: the target, or what drafts.

    Args:
        images: slots of a VISION launch -> its parts; None: there are no such launches.
        layers: of the decoder, in order.
        taps: layers whose hidden states its text launches keep for a head.
        windows: the distinct windows of all layers, as ``TextConfig.windows``.
        upto: True if a token may attend to later positions.
        joins: True if neighbours may run as one: nothing is added between layers.
        adds_rows: True if parts of an image are added to the residual stream after some layers.
        causal_layers: True if some layers do without ``upto``.
    """

    buckets: Sequence[Bucket]
    images: Callable[[int], VisionLaunchParts] | None
    layers: Sequence[PlannedLayer]
    taps: tuple[int, ...] = ()
    windows: tuple[int, ...] = (0,)
    upto: bool = False
    joins: bool = True
    adds_rows: bool = False
    causal_layers: bool = False


class DecodedPieces(NamedTuple):
    """Pieces of quantised weights that a device decodes once for many rows.

    Args:
        rows: fewest rows of such a launch; 0: none.
        bytes: most bytes of a piece, which such a launch takes beside its activations.
    """

    rows: int = 0
    bytes: int = 0


class WarmupTimes(NamedTuple):
    """Estimated seconds of a warm-up, which measurements replace.

    Args:
        bucket: of each bucket, whatever its layers.
        layer: of each layer of a bucket.
        stage: of the first bucket of a stage, on a device whose kernels are compiled once for all shapes.
    """

    bucket: float = 0.5
    layer: float = 0.15
    stage: float = 0.0


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
        compiled: the models of a plan -> a line for users about what such a mode compiles; None: there is nothing to
            say.
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
        auto_operations: most operations of a launch, on one device, whose large graph ``--graph-memory auto`` keeps
            memory for; the host launches larger ones in a small part of their time. 0: no limit.
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
        quantised: the form in which quantised weights are kept (core/quant/quantised_weight_layout_and_bytes.py);
            empty: they are dequantised while loading.
        host_kv: evicted KV blocks can go to host memory. The backend is a ``CopyingBackend``
            (core/launches/host_block_copies.py).
        host_blocks: numbers of such blocks that one launch gathers or scatters, ascending; the backend is then a
            ``PlanningBackend``. Empty: copies need no launches and no memory of their own.
        host_weights: the weights of some layers can lie in host memory, and be copied within launches
            (`--cpu-offload-gb`). The backend is ``core.models.model_and_ops_api.HostLayering``.
        kv_codes: supported forms of an 8-bit KV cache (core/kv_cache_format.py) -> the torch dtype of their codes
            on this device; empty: none.
        aligned: the unit that widths of matrix products are padded to with zeros while weights load. 1: no width is
            changed.
        masked_head: SAMPLE has a third variant, ``masked``, which returns only the best id that a row's mask allows.
            The backend's ops are ``core.models.model_and_ops_api.MaskingOps``.
        best_head: the argmax of a row can be computed without storing the logits. The backend's ops are
            ``core.models.model_and_ops_api.BestOps``.
        split_head: greedy rows get a SAMPLE launch of their own if other rows, which cost many times as much, are in
            the step.
        drawn_head: SAMPLE has a variant ``draw``, which samples by all parameters but returns no log-probabilities. The
            backend's ops are ``core.models.model_and_ops_api.DrawingOps``.
        penalised_head: SAMPLE has a variant ``penalised``, which returns only the best id after penalties, bias and
            mask. The backend's ops are ``core.models.model_and_ops_api.PenalisingOps``.
        wide_head: SAMPLE launches that report more ids than those which draw are planned, since each shape is compiled.
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
            ops are ``core.models.model_and_ops_api.RecurrentOps``.
        drafts: rows of decoding sequences may have several tokens, and SAMPLE reads ``HeadInputs.ahead``, so that
            drafts can be verified (core/spec). A device with planned shapes has the stage VERIFY for them.
        fused_tokens: launches of up to so many tokens are faster than others.
        joined_adapters: one A and one B hold the adapters of all slots and of all parts of a fused matrix
            (core/memory/weight_bytes.py), and the numbers of slots are repeated for each of their columns.
        adapters: text buckets have the variant ``LORA``, whose launches have ``TextTensors.adapter``.
        stages: the backend has a ``pipe`` (core/launches/pipeline_transfer.py) if ``BackendConfig.stages`` is above 1.
        warmup: how long compiling and capturing takes.
        group_bytes: bytes of a card's memory that its collectives take before ``Memory.total`` is read, where the card
            is one of several ranks.
        sum_bytes: number of ranks -> bytes of a card's memory that their sums take. A start finds them in use, since
            they are allocated before it reads what is free; the planner adds them to what others use.
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
    compiled: Callable[[Sequence[PlannedModel]], str] | None = None
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
    auto_operations: float = 0.0
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
    fused_tokens: int = 0
    adapters: bool = False
    joined_adapters: bool = False
    penalised_head: bool = False
    wide_head: bool = False
    attention: Mapping[str, Callable[[Bucket, InputSizes], int]] = field(default_factory=dict)
    windows: bool = False
    upto: bool = False
    sinks: bool = False
    encoder_data_parallel: bool = False
    cross_attention: bool = False
    cross_attention_bytes: Callable[[Bucket, InputSizes], int] | None = None
    stages: bool = False
    recurrent: bool = False
    warmup: WarmupTimes = WarmupTimes()
    group_bytes: int = 0
    sum_bytes: Callable[[int], int] = no_bytes


def capturable(policy: Policy, bucket: Bucket) -> bool:
    """Returns True if a launch of ``bucket`` is small enough to gain from a graph."""
    limit = policy.capture_limit.get(bucket.stage)
    return limit is None or padded_tokens(bucket) <= limit
