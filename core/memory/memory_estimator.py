"""Estimates the memory that a model needs on one device, by formula. Pure; sizes in bytes unless named otherwise.

``ranks`` devices share the model: query heads, MLP columns and the vocabulary are divided; KV heads are divided too, or
replicated if there are fewer of them than ranks. A formula counts what is held at the same time; measurements replace
it (core/memory/graph_measurement_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import LORA, Bucket, Stage, align_up, drafts_ahead, padded_tokens, verified_width, wide_ids
from trencadis.core.checkpoint.family import DeviceShare
from trencadis.core.checkpoint.model_config import OUT, SANDWICH, ModelConfig, TextConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.device_shape_policy import DecodedPieces, GraphMemory, InputSizes, WarmupTimes
from trencadis.core.kv_cache_format import head_bytes
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.memory import launch_memory
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.memory.memory_division import MemoryInUse
from trencadis.core.memory.weight_bytes import (
    AdapterSlotSizes,
    adapter_bytes,
    decoder_values,
    largest_dequantised_bytes,
    layer_bytes,
    norm_excess,
    quantisation_excess,
    sink_bytes,
)
from trencadis.core.quant.quantised_weight_layout_and_bytes import CODES
from trencadis.core.request import MAX_BIAS, MAX_LOGPROBS
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.vision_config import CUT_WIDTHS, NO_SLOT

SPARE_SLOTS = 8
"""Sampler rows beyond max_num_seqs, so that a pending fetch does not reduce the batch."""

FREQUENCY = 12
"""Bytes of a rotary frequency: float32, plus its axis as int64."""

TILE = 1024
"""Query slots of one tile of full attention in the vision tower."""

GRAPH = 20 << 10
"""Bytes of a graph with its own tensors, apart from these and its outputs: from a published log of 48 graphs."""

CODE = 4096
"""Bytes of an operation of a graph with a shared workspace: a guess that measurements replace."""

OPERATIONS = {
    Stage.PREFILL: 80,
    Stage.FRESH: 50,
    Stage.CONTEXT: 80,
    Stage.DECODE: 96,
    Stage.VISION: 72,
    Stage.VERIFY: 100,
}
"""Operations of a layer in the reference bodies, rounded up; each tile of the tower's full attention adds 9."""

HEAD_OPERATIONS = 120
"""Operations before and after the layers; also the total of SAMPLE, RESET and POOL."""

HEADS = (Stage.SAMPLE, Stage.RESET, Stage.POOL)
"""Stages without layers."""

SLICE = 8192
"""Stored tokens whose keys and values a CONTEXT launch holds at the same time."""

EXPERT_ROWS = 8192
"""Rows (tokens times experts) that a product over all experts holds at the same time."""

STREAMS, WIDEST = 4, 8
"""Tensors of the residual stream's width that are held during attention or the MLP, and while nothing else is held: in
norms, in all-reduces, in the tower's float32 rotary.
"""


def kv_heads(text: TextConfig, ranks: int) -> int:
    """Returns the KV heads of one of ``ranks`` devices: a share, or one if there are fewer heads than devices."""
    return -(-text.kv_heads // ranks) if text.kv_heads >= ranks else 1


def state_slots(model: ModelConfig, seqs: int) -> int:
    """Returns the rows of the sampler state: one per sequence, spare ones and the sink.

    If nothing is sampled, there is only the sink.
    """
    return 1 if model.pooling is not None or not model.share.ends else seqs + SPARE_SLOTS + 1


def held_rows(model: ModelConfig, rows: int) -> int:
    """Returns the arena rows on this stage, of an engine's ``rows``; only the first stage reads images."""
    return rows if model.share.starts else RESERVED_ROWS


def arena_width(model: ModelConfig, ranks: int) -> int:
    """Returns the columns of the arena on one of ``ranks`` devices.

    They hold an embedding, or keys and values of all cross-attention layers.
    """
    t = model.text
    return 2 * len(t.cross_attention_layers) * kv_heads(t, ranks) * t.head_dim if t.cross_attention_layers else t.width


def row_width(model: ModelConfig) -> int:
    """Returns the columns of the hidden rows: the input of the head, or of the next stage."""
    return model.text.width if model.share.ends else model.text.hidden


def is_joined_context(tokens: int, stored: int) -> bool:
    """Returns True if a CONTEXT launch attends to all keys in one masked call."""
    return tokens <= TILE and stored <= SLICE


def row_blocks(text: TextConfig, block_size: int) -> int:
    """Returns the KV blocks of the longest row that the model supports.

    Backends allow for it regardless of --max-model-len.
    """
    return -(-text.max_positions // block_size)


@dataclass(frozen=True)
class MemoryEstimator:
    """Computes the sizes of one model on one of ``ranks`` devices.

    ``quantised``: the device's form of quantised weights; ``unit``: the multiple that product widths are padded to;
    ``cross_attention_bytes``, ``decoded``, ``warmup``: as in ``Policy``; ``adapters``: slots of LoRA adapters, if any.
    """

    model: ModelConfig
    itemsize: int = 2
    ranks: int = 1
    inputs: Callable[[Bucket, InputSizes], int] = launch_memory.any_inputs
    block_size: int = 128
    graphs: GraphMemory = GraphMemory()
    quantised: str = ""
    unit: int = 1
    cross_attention_bytes: Callable[[Bucket, InputSizes], int] | None = None
    adapters: AdapterSlotSizes | None = None
    decoded: DecodedPieces = DecodedPieces()
    warmup: WarmupTimes = WarmupTimes()

    @property
    def text(self) -> TextConfig:
        """The decoder's configuration."""
        return self.model.text

    @property
    def kv_heads(self) -> int:
        """KV heads of this device."""
        return kv_heads(self.text, self.ranks)

    @property
    def towers(self) -> int:
        """Number of ranks that share one vision tower."""
        return 1 if self.model.encoder_data_parallel else self.ranks

    def _share(self, count: int) -> int:
        return -(-count // self.ranks)

    def _columns(self, count: int) -> int:
        """Returns a share of columns that is padded with zeros."""
        return align_up(self._share(count), self.model.alignment_unit(self.unit))

    def block_bytes(self, block_size: int) -> int:
        """Returns the bytes of K and V of one block over all layers of this device."""
        t, cached = self.text, self.model.cached
        each = [t] * len(cached) if t.same_heads else [t.of_layer(index) for index in cached]
        return block_size * sum(kv_heads(t, self.ranks) * head_bytes(t.kv, t.head_dim, self.itemsize) for t in each)

    def slot_bytes(self) -> int:
        """Returns the bytes of one sequence's state over all recurrent layers of this device."""
        held = self.text.recurrent
        return 0 if held is None else len(self.model.recurrent) * held.slot_bytes(self.itemsize, self.ranks)

    def weights(self) -> int:
        """Returns the exact bytes of weights and rotary frequencies on this device.

        Every rank holds the whole embedding and all norms.
        """
        own = family_of(self.model.architecture).weights
        if own is not None:
            return own(self.model, DeviceShare(self.itemsize, self.ranks, self.quantised))
        t, share = self.text, self.model.share
        v = self.model.vision if share.starts else None
        unit = self.model.alignment_unit(self.unit)
        total = decoder_values(self.model, self.ranks, unit)
        frequencies = t.full_head_dim // 2 * FREQUENCY + norm_excess(self.model, self.itemsize, self.ranks)
        frequencies += self.head_values * 4 if share.ends else 0
        frequencies += t.head_dim // 2 * (4 if t.same_heads else FREQUENCY) if t.second_rotary else 0
        frequencies += len(share.layers) * sink_bytes(t, self.ranks)
        if t.long_from:  # a second table, and the factors of both
            frequencies += t.head_dim // 2 * FREQUENCY + t.head_dim * 4
        if t.kv is not None:
            caches = (kv_heads(t.of_layer(index), self.ranks) for index in self.model.cached)
            frequencies += sum(map(t.kv.fixed_bytes, caches))
        if v is not None:
            total += v.count_rank_weights(self.towers, unit)
            frequencies += v.tables(unit)
        return (
            total * self.itemsize
            + frequencies
            + quantisation_excess(self.model, self.itemsize, self.ranks, self.quantised, unit)
        )

    def adapter_slots(self) -> int:
        """Returns the exact bytes of the slots of adapters on this device."""
        if self.adapters is None:
            return 0
        return adapter_bytes(self.model, self.itemsize, self.ranks, self.adapters, self.model.alignment_unit(self.unit))

    def layer(self, index: int) -> int:
        """Returns the exact bytes of the weights of decoder layer ``index`` on this device."""
        unit = self.model.alignment_unit(self.unit)
        return layer_bytes(self.model, index, self.itemsize, self.ranks, self.quantised, unit)

    @property
    def classes(self) -> int:
        """Number of rows of the class head, which every rank holds in float32."""
        return self.model.pooling.classes if self.model.pooling is not None else 0

    @property
    def head_values(self) -> int:
        """Number of values of the class head, including those of a linear layer before it."""
        pooling, width = self.model.pooling, self.text.width
        if pooling is None or not pooling.classes:
            return 0
        biases = pooling.classes + (width if pooling.inner else 0) if pooling.biased else 0
        return (pooling.classes + (width if pooling.inner else 0)) * width + biases

    def outputs(self, bucket: Bucket) -> int:
        """Returns the bytes of a graph's own outputs; text and VISION launches write to persistent tensors instead."""
        if bucket.stage is Stage.POOL:
            return 4 * bucket.dims[0] * (self.classes or self.text.width)
        if bucket.stage is not Stage.SAMPLE or self.graphs.outputs_apart:
            return 0
        top = wide_ids(bucket) or (MAX_LOGPROBS if bucket.variant == "full" or drafts_ahead(bucket) else 0)
        return 4 * bucket.dims[0] * (3 + 2 * top if top else 1)

    def all_inputs(self, plan: Plan) -> int:
        """Returns the bytes of the inputs of all programs, which are allocated at the start.

        If graphs share memory, only the largest of each stage counts.
        """
        sizes = self._sizes(max(plan.block_size, 1))
        found = {s: [self.inputs(b, sizes) for b in plan.of(s)] for s in Stage if plan.of(s)}
        return sum((max if plan.policy.pool_cost == "max" else sum)(sizes) for sizes in found.values())

    def _sizes(self, block: int) -> InputSizes:
        t, slot = self.text, self.model.vision.slot if self.model.vision is not None else NO_SLOT
        full = t.layer_forms[0]
        heads = kv_heads(full, self.ranks)
        return InputSizes(
            t.vocab, block, row_blocks(t, block), heads, slot, t.upto, any(t.windows),
            max(self._share(form.heads) // kv_heads(form, self.ranks) for form in t.layer_forms), full.head_dim,
            t.recurrent is not None,
        )  # fmt: skip

    def layers(self, bucket: Bucket) -> int:
        """Returns the number of layers in a graph."""
        if bucket.stage is Stage.VISION:
            return self.model.vision.depth if self.model.vision else 0
        return (
            0
            if bucket.stage in HEADS
            else len(self.model.share.layers) - launch_memory.cross_attention_layer_count(self.model, bucket, False)
        )

    def copies(self, sizes: tuple[int, ...], block_size: int, graphs: bool) -> int:
        """Returns the bytes that launches for copies of KV blocks and of a recurrent state keep: buffers, the inputs of
        each, and graphs for both directions.
        """
        if not sizes:
            return 0
        own = self.slot_bytes()
        kept = sizes[-1] * self.block_bytes(block_size) + sum(sizes) * 4 * block_size + own + 4 * (own > 0)
        return kept + 2 * (len(sizes) + (own > 0)) * GRAPH * graphs

    def copying(self, sizes: tuple[int, ...], block_size: int) -> int:
        """Returns the peak bytes of such a launch: the gathered blocks, one of them once more, and slots."""
        if not sizes:
            return 0
        most = sizes[-1]
        return max((most + 2) * self.block_bytes(block_size) + 8 * most * block_size, 3 * self.slot_bytes())

    def code(self, bucket: Bucket) -> int:
        """Returns the bytes of one graph with a shared workspace, without the workspace."""
        operations = HEAD_OPERATIONS + OPERATIONS.get(bucket.stage, 0) * self.layers(bucket)
        if bucket.stage is Stage.VISION and self.model.vision is not None:
            operations += 9 * self.model.vision.whole * -(-bucket.dims[0] // TILE)
        return CODE * operations

    def activations(self, bucket: Bucket, block_size: int) -> int:
        """Returns the peak bytes of one launch: residual streams, plus attention or the MLP."""
        stage, size, t = bucket.stage, padded_tokens(bucket), self.text
        pieces = launch_memory.decoded_bytes(self.model, self.decoded, self.itemsize, size)
        if stage is Stage.VISION:
            v = self.model.vision
            if v is None:
                return 0
            tower = v.activations(size, self.itemsize, self.towers, self.model.alignment_unit(self.unit))
            held = launch_memory.held_bytes(self.model, size, self.itemsize, self.ranks)
            return max(tower, held) + self._adapter_work(bucket)
        if stage is Stage.SAMPLE:
            each = 4 if bucket.variant == "greedy" else 48 if drafts_ahead(bucket) else 40
            return t.vocab * (each * size + (0 if each == 4 else 7)) + self._opened[1] + pieces
        if stage is Stage.RESET:
            return 0
        if stage is Stage.POOL:
            inner = 8 if self.model.pooling is not None and self.model.pooling.inner else 0
            return size * t.width * (self.itemsize + 21 + inner) + 4 * size**2
        held = STREAMS + (t.norm_placement in (SANDWICH, OUT))  # inputs and outputs of norms after attention and MLP
        factors = 8 * (t.full_head_dim + (t.head_dim if t.second_rotary else 0))
        streams = size * (held * t.hidden * self.itemsize + factors)
        streams += 4 * size * t.layers * t.layer_inputs * self.itemsize
        attention = max(self._attention_bytes(form, bucket, block_size) for form in t.layer_forms)
        attention = max(attention, launch_memory.recurrent_work_bytes(self.model, bucket, self.itemsize, self.ranks))
        narrow = streams + max(attention, self._mlp(size)) + self._adapter_work(bucket)
        beside = self.shared_attention_bytes(bucket) + self._opened[0] + pieces
        return beside + max(narrow, size * WIDEST * t.hidden * self.itemsize)

    def _attention_bytes(self, t: TextConfig, bucket: Bucket, block_size: int) -> int:
        """Returns the peak bytes of the attention of one layer, whose configuration is ``t``."""
        stage, size, heads, groups = bucket.stage, padded_tokens(bucket), self._share(t.heads), kv_heads(t, self.ranks)
        attention = size * 3 * (heads + 2 * groups) * t.head_dim * self.itemsize
        attention += size * (heads * t.head_dim * self.itemsize + 8) if t.query_growth is not None else 0
        if len(bucket.dims) == 2 and stage in (Stage.CONTEXT, Stage.DECODE, Stage.VERIFY):
            each = verified_width(bucket) if stage is Stage.VERIFY else 1
            attention += self._gathered_bytes(t, stage, size, bucket.dims[1] * block_size, heads * each)
        if self.cross_attention_bytes is not None:
            return attention + self.cross_attention_bytes(bucket, self._sizes(block_size))
        work = launch_memory.cross_attention_work_bytes(self.model, bucket, self.itemsize, heads, groups)
        return attention + work

    def _adapter_work(self, bucket: Bucket) -> int:
        if self.adapters is None or bucket.variant != LORA:
            return 0
        unit = self.model.alignment_unit(self.unit)
        return launch_memory.adapter_work_bytes(self.model, bucket, self.adapters, self.itemsize, self.ranks, unit)

    @cached_property
    def _opened(self) -> tuple[int, int]:
        """Largest bytes of weights dequantised to the engine's dtype for one product: (of a layer, of the head)."""
        args = self.model, self.itemsize, self.ranks, self.quantised, self.model.alignment_unit(self.unit)
        return largest_dequantised_bytes(*args, False), largest_dequantised_bytes(*args, True)

    def _mlp(self, size: int) -> int:
        """Returns the bytes of the MLP of ``size`` tokens, or of the experts with their weights.

        Experts run in slices over all experts, or on each token's own experts.
        """
        t, e = self.text, self.text.experts
        inner = max(form.intermediate for form in t.layer_forms)
        dense = 4 * size * self._columns(inner) * self.itemsize if t.dense_layers else 0
        if e is None:
            return dense
        rows = size * min(max(EXPERT_ROWS // max(size, 1), 1), e.count)
        inner = self._share(e.inner) * self.itemsize
        held = 2 if self.model.quant is not None and self.quantised == CODES else 1  # rows rounded or reordered
        own = size * e.top * (held * inner + t.hidden * self.itemsize)
        shared = size * (4 * self._columns(e.shared) + 2 * t.hidden) * self.itemsize if e.shared else 0
        sparse = max(rows * 7 * inner, own, shared) + size * (8 * e.count + 2 * t.hidden * self.itemsize)
        return max(dense, sparse) + (2 * size * t.hidden * self.itemsize if e.beside else 0)

    def shared_attention_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes that one launch allocates for the attention of all its layers, e.g. masks."""
        stage, dims = bucket.stage, bucket.dims
        row_numbers = (
            launch_memory.cross_attention_row_bytes(self.model, bucket) if self.cross_attention_bytes is None else 0
        )
        if stage is Stage.VISION:
            return (9 + bool(self.model.vision and self.model.vision.slot.padding_windows)) * dims[0]
        if len(dims) != 2 or stage not in (Stage.CONTEXT, Stage.DECODE, Stage.VERIFY):
            return row_numbers
        size, blocks = dims
        width = blocks * self.block_size
        if stage is Stage.CONTEXT:
            sliced = width + 4 * -(-width // (SLICE // self.block_size * self.block_size))
            return row_numbers + (size * (width + size) if is_joined_context(size, width) else sliced)
        each = verified_width(bucket) if stage is Stage.VERIFY else 1
        spread = sum(kv_heads(form, self.ranks) for form in self.text.layer_forms)
        heads = 2 * each * self._share(self.text.heads) * spread * self.itemsize  # spread to heads and back
        return blocks * 16 + 4 * width * each + 4 * size * blocks + heads + row_numbers

    def _gathered_bytes(self, t: TextConfig, stage: Stage, size: int, width: int, heads: int) -> int:
        """Returns the bytes of keys and values gathered from the cache, per slice, and of their scores or outputs."""
        d, item, groups = t.head_dim, self.itemsize, kv_heads(t, self.ranks)
        keys = groups * d * item
        codes = groups * d if t.kv is not None else 0
        if stage is Stage.CONTEXT:
            opened = (1 + 4 + 4) * codes * min(width, SLICE)  # codes, and float32 before and after the scales
            if is_joined_context(size, width):
                return 4 * (width + size) * keys + opened
            return 2 * min(width, SLICE) * keys + 14 * size * heads * d + 2 * min(size, TILE) * size + opened
        spread = groups * item
        scaled = codes + (8 * heads if codes else 0)
        each = keys + heads * (12 + spread) + scaled
        return width * each + -(-width // self.block_size) * heads * d * (8 + spread)

    def seconds(self, bucket: Bucket) -> float:
        """Returns the seconds to compile and capture one bucket that is not the first of its stage."""
        return self.warmup.bucket + self.warmup.layer * self.layers(bucket)

    def warmup_seconds(self, buckets: Iterable[Bucket]) -> dict[Bucket, float]:
        """Returns the seconds of each bucket of a warm-up; kernels are compiled for the largest one of a stage."""
        found = {b: self.seconds(b) for b in buckets}
        largest = {b.stage: b for b in sorted(found, key=padded_tokens)}
        return found | {b: found[b] + self.warmup.stage for b in largest.values()}

    def price(self, bucket: Bucket, rule: str = "sum") -> GraphPrice:
        """Returns a graph's predicted cost without its inputs: its outputs and its workspace.

        The workspace is what the graph keeps; if graphs share memory (``max``), it is the peak of a launch.
        """
        if rule == "max":
            work = self.activations(bucket, 1) + self.graphs.library
            return GraphPrice(bucket, self.outputs(bucket) + self.code(bucket), work)
        return GraphPrice(bucket, self.outputs(bucket) + GRAPH, self.kept_bytes(bucket))

    def kept_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes of the tensors that a graph keeps: those passed at one of its cuts, each counted once.

        A layer passes on the residual stream and its own output; rotary factors and indices are passed at the first
        cut. Before a collective, its operands and their inputs are passed too. The outputs of collectives are kept even
        without the tensor cache: sums in place of their operands, and rows of all ranks.
        """
        t, v, size = self.text, self.model.vision, padded_tokens(bucket)
        if bucket.stage is Stage.VISION and v is not None:
            leaving = v.exit_keeps(size, self.itemsize, self.towers, self.graphs.cached)
            leaving += launch_memory.kept_bytes(self.model, size, self.itemsize, self.ranks, self.graphs.cached)
            first = 8 * v.head_dim * v.rotary - (-8 // v.slot.cell)
            return self._layers_keep(bucket, self.towers, v.hidden, v.head_dim, v.cut_widths, v.heads, first) + leaving
        if bucket.stage is Stage.SAMPLE and self.ranks > 1:
            share = self._share(t.vocab)
            cut_widths = (share + t.width) * self.itemsize + 36 if self.graphs.cached else 0
            return size * (self.ranks * share * self.itemsize + cut_widths)
        if bucket.stage in HEADS:
            return 0
        cut_widths = CUT_WIDTHS + (1 if t.norm_placement in (SANDWICH, OUT) else 0)
        experts = 0 if t.experts is None else size * len(self.model.share.layers) * self._share(t.experts.inner)
        widest = max(form.head_dim for form in t.layer_forms)
        first = 8 * t.full_head_dim + 16 + (4 if t.query_growth is not None else 0)
        kept = self._layers_keep(bucket, self.ranks, t.hidden, widest, cut_widths, t.heads, first)
        gated = launch_memory.cross_attention_kept_bytes(self.model, bucket, self.itemsize)
        return kept + (experts * self.itemsize + gated if self.ranks > 1 and self.graphs.cached else 0)

    def _layers_keep(
        self, bucket: Bucket, ranks: int, width: int, d: int, cut_widths: int, heads: int, first: int
    ) -> int:
        """Returns ``kept_bytes`` of layers with these sizes.

        Args:
            ranks: number of ranks that share the layers.
            cut_widths: widths of the residual stream passed at the cuts before a layer's two collectives.
            first: bytes of a token's rotary factors, and of its indices in the type of the body, at the first cut.
        """
        layers, size = self.layers(bucket), padded_tokens(bucket)
        if not self.graphs.cached:
            return 0 if ranks == 1 else size * layers * 2 * width * self.itemsize
        cuts, each = self.graphs.cuts(layers), 2 * width
        if ranks > 1:
            cuts, each = layers, cut_widths * width + -(-heads * d // ranks)
        once = self.shared_attention_bytes(bucket) if cuts else 0
        return launch_memory.kept_by_cuts(size, each * self.itemsize, cuts, first) + once


def estimate_memory_in_use(
    estimator: MemoryEstimator,
    plan: Plan,
    limits: ShapeLimits,
    total: int,
    others: int,
    arena_rows: int,
    states: int = 0,
) -> MemoryInUse:
    """Returns all memory that is in use before the KV cache is allocated; ``states``: slots of recurrent state."""
    t, model = estimator.text, estimator.model
    slots = state_slots(model, limits.max_rows)
    wide = row_width(model) + (0 if model.share.starts else t.hidden)  # rows received and rows sent
    state = slots * (4 + 4 * t.vocab + -(-t.vocab // 8) + MAX_BIAS * 12)
    return MemoryInUse(
        total=total,
        others=others,
        weights=estimator.weights(),
        arena=held_rows(model, arena_rows) * model.row_parts * arena_width(model, estimator.ranks) * estimator.itemsize,
        state=state,
        hidden=(max(limits.max_tokens, limits.max_rows) + 1) * wide * estimator.itemsize,
        adapters=estimator.adapter_slots(),
        inputs=estimator.all_inputs(plan),
        activations=max((estimator.activations(b, plan.block_size) for b in plan.buckets), default=0),
        recurrent=states * estimator.slot_bytes(),
    )
