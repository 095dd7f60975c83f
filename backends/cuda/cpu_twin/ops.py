"""The ops of the twin: the reference over the CUDA backend's inputs, and attention by real rows and images.

Attention is one call each, as a kernel is: it reads lengths when it runs, so a graph replays it on the current contents
of its inputs, and padding costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.cpu_offloaded_layers import HostLayerOps
from trencadis.backends.cuda.cpu_twin import twin_expert_operators
from trencadis.backends.cuda.cpu_twin.cuda_rules import TwinMemory
from trencadis.backends.cuda.cpu_twin.twin_expert_operators import decode_once, register_op
from trencadis.backends.cuda.weights.quantised_weight import (
    NEWEST,
    QuantisedWeight,
    dequantise,
    pack_quantised_weight,
    product,
)
from trencadis.backends.cuda.weights.stacked_experts import StackedExperts, stack_experts
from trencadis.core import envs
from trencadis.core.device.backend import (
    Attn,
    ExpertBiases,
    ExpertWeights,
    HeadTensors,
    HeadTensorsOut,
    LayerKV,
    SamplerState,
    Segments,
    Weight,
)
from trencadis.core.device.launch_tensors import CrossAttentionTensors, RecurrentRows
from trencadis.core.kv_cache_format import ZERO_BLOCK
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import DECODED_BYTES, DECODED_ROWS

BY_LENGTH = CpuOps()


class TwinOps(HostLayerOps, ReferenceOps):
    """Implements ``core.device.backend.Ops`` and charges weights to the twin's memory."""

    def __init__(self, memory: TwinMemory) -> None:
        self._memory = memory

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        self._memory.take(weight.nbytes + (0 if bias is None else bias.nbytes))
        return super().pack_weight(weight, bias)

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Packs a weight as a card stores it, and charges its bytes."""
        packed = pack_quantised_weight(q, bias, NEWEST, envs.get_bool("TRENCADIS_CUDA_BLOCK_PRODUCTS"))
        self._memory.take(packed.nbytes + (0 if bias is None else bias.nbytes))
        return packed

    def pack_experts(
        self, gate_up: Sequence[Tensor], down: Sequence[Tensor], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        beside = () if biases is None else (*biases.gate_up, *biases.down)
        self._memory.take(sum(t.nbytes for t in (*gate_up, *down, *beside)))
        return super().pack_experts(gate_up, down, biases)

    def pack_quantised_experts(
        self, gate_up: Sequence[Tensor | QTensor], down: Sequence[Tensor | QTensor], biases: ExpertBiases | None = None
    ) -> StackedExperts:
        """Packs experts as a card stores them, and charges their bytes."""
        packed = stack_experts(gate_up, down, biases, NEWEST)
        beside = () if biases is None else (*biases.gate_up, *biases.down)
        self._memory.take(packed.nbytes + sum(t.nbytes for t in beside))
        return packed

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        """Runs quantised experts in one recorded call, which reads each token's own experts as kernels do."""
        if not isinstance(w, StackedExperts):
            return super().experts(x, scores, w, top, normalise, kind)
        return twin_expert_operators.call(x, scores, w, top, normalise, kind)

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        """Multiplies by a quantised weight in one recorded call, as the kernel does."""
        if not isinstance(w, QuantisedWeight):
            return super().linear(x, w)
        held = w.codes, w.factor, w.scale, w.zero, w.gather, w.bias, w.blocks
        numbers = w.kind, w.columns, w.group, w.rounds, w.in_features
        room = None
        if len(x) >= DECODED_ROWS and not w.rounds and x.itemsize == 2:  # where a card decodes a piece of the weight
            room = x.new_empty(min(DECODED_BYTES // x.itemsize, w.out_features * w.columns))
        out: Tensor = torch.ops.trencadis_twin.coded(x, *held, *numbers, room)
        return out

    def draw(self, logits: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        return HeadTensorsOut(self.sample(logits, inputs, state, True).token, None, None, None, None)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes attention of text; surplus tokens give zeros."""
        ragged = attn.row_start, attn.context, attn.blocks, attn.block_start  # type: ignore[attr-defined]
        upto = getattr(attn, "upto", None)
        out: Tensor = torch.ops.trencadis_twin.attend(q, *kv[:6], *ragged, upto, sinks, scale, window)
        return out

    gathers = False

    def cross_attend(
        self, q: Tensor, held: Tensor, rows: Tensor | None, images: CrossAttentionTensors, scale: float
    ) -> Tensor:
        """Computes cross-attention over the rows of each image up to the last one that any token sees."""
        found = images.reach, images.times, images.unit_row  # type: ignore[attr-defined]
        out: Tensor = torch.ops.trencadis_twin.attend_pictures(q, held, *found, scale)
        return out

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: RecurrentRows, attn: Attn,
        activation: str,
    ) -> Tensor:  # fmt: skip
        """Computes and stores in one recorded call, by the tokens that each row has then."""
        out: Tensor = torch.ops.trencadis_twin.causal_conv(x, weight, bias, state, *rows, attn.row_start, activation)
        return out

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn
    ) -> Tensor:
        out: Tensor = torch.ops.trencadis_twin.delta_rule(q, k, v, g, beta, state, *rows, attn.row_start)
        return out

    def state_space(
        self, c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor, state: Tensor, rows: RecurrentRows, attn: Attn
    ) -> Tensor:
        out: Tensor = torch.ops.trencadis_twin.state_space(c, b, x, g, step, state, *rows, attn.row_start)
        return out

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        out: Tensor = torch.ops.trencadis_twin.attend_windows(q, k, v, seg.segment, seg.real, scale)
        return out

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Computes attention over whole images. Padding slots of a real window give zeros; a padding window is an image
        of its own.
        """
        padding_window = seg.padding_window
        out: Tensor = torch.ops.trencadis_twin.attend_images(q, k, v, seg.segment, seg.real, padding_window, scale)
        return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, kept: Tensor | None,
    pairs: Tensor | None, row_start: Tensor, context: Tensor, blocks: Tensor, block_start: Tensor, upto: Tensor | None,
    sinks: Tensor | None, scale: float, window: int,
) -> Tensor:  # fmt: skip
    table, kv = rectangle(blocks, block_start), LayerKV(k, v, k_scale, v_scale, kept, pairs)
    return BY_LENGTH.attend(q, k, v, kv, Attn(row_start, context, table, row_start, upto), scale, window, sinks)


def _cross_attend(q: Tensor, held: Tensor, reach: Tensor, times: Tensor, unit_row: Tensor, scale: float) -> Tensor:
    length = max(int(reach.max()), 1)
    rows = (unit_row[:, None] + torch.arange(length, dtype=unit_row.dtype)).flatten().long()
    seen = CrossAttentionTensors(unit_row, reach, times, reach[:, 0])
    return BY_LENGTH.cross_attend(q, held, rows, seen, scale)


def _attn_of(row_start: Tensor) -> Attn:
    """Returns attention inputs that have the rows alone."""
    return Attn(row_start, row_start, row_start[:, None], row_start)


def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slot: Tensor, begins: Tensor, source: Tensor,
    count: Tensor, row_start: Tensor, activation: str,
) -> Tensor:  # fmt: skip
    rows = RecurrentRows(slot, begins, source, count)
    return BY_LENGTH.causal_conv(x, weight, bias, state, rows, _attn_of(row_start), activation)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slot: Tensor, begins: Tensor,
    source: Tensor, count: Tensor, row_start: Tensor,
) -> Tensor:  # fmt: skip
    rows = RecurrentRows(slot, begins, source, count)
    return BY_LENGTH.delta_rule(q, k, v, g, beta, state, rows, _attn_of(row_start))


def _state_space(
    c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor, state: Tensor, slot: Tensor, begins: Tensor,
    source: Tensor, count: Tensor, row_start: Tensor,
) -> Tensor:  # fmt: skip
    rows = RecurrentRows(slot, begins, source, count)
    return BY_LENGTH.state_space(c, b, x, g, step, state, rows, _attn_of(row_start))


def rectangle(blocks: Tensor, start: Tensor) -> Tensor:
    """Returns int32 [rows + 1, longest]: row r is ``blocks[start[r] : start[r + 1]]``, then ZERO.

    Args:
        blocks: int32 [capacity], the block ids of all rows in order.
        start: int32 [rows + 2].
    """
    index = start[:-1, None] + torch.arange(max(int(start.diff().max()), 1), dtype=start.dtype)
    table = blocks[index.clamp(max=blocks.shape[0] - 1).long()]
    return torch.where(index < start[1:, None], table, ZERO_BLOCK)


def _attend_windows(q: Tensor, k: Tensor, v: Tensor, segment: Tensor, real: Tensor, scale: float) -> Tensor:
    return BY_LENGTH.attend_windows(q, k, v, Segments(segment, real), scale)


def _attend_images(
    q: Tensor, k: Tensor, v: Tensor, segment: Tensor, real: Tensor, padding_window: Tensor | None, scale: float
) -> Tensor:
    return BY_LENGTH.attend_images(q, k, v, Segments(segment, real, padding_window), scale)


def _quantised_linear(
    x: Tensor, codes: Tensor, factor: Tensor, scale: Tensor | None, zero: Tensor | None, gather: Tensor | None,
    bias: Tensor | None, blocks: Tensor | None, kind: int, columns: int, group: int, rounds: bool, inputs: int,
    room: Tensor | None,
) -> Tensor:  # fmt: skip
    w = QuantisedWeight(
        codes, factor, scale, zero, gather, bias, kind, columns, group, rounds, codes.shape[0], inputs, blocks
    )  # fmt: skip
    return product(x, w, decode_once(codes, lambda: dequantise(w)))


register_op(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor? kept, Tensor? pairs, "
    "Tensor row_start, Tensor context, Tensor blocks, Tensor block_start, Tensor? upto, Tensor? sinks, "
    "float scale, int window) -> Tensor",
    _attend,
)
register_op(
    "attend_pictures(Tensor q, Tensor held, Tensor reach, Tensor times, Tensor unit_row, float scale) -> Tensor",
    _cross_attend,
)
_ROWS = "Tensor slot, Tensor begins, Tensor source, Tensor count, Tensor row_start"
register_op(
    f"causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, {_ROWS}, str activation) -> Tensor",
    _causal_conv,
)
register_op(
    f"delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, {_ROWS}) -> Tensor", _delta_rule
)
register_op(
    f"state_space(Tensor c, Tensor b, Tensor x, Tensor g, Tensor step, Tensor(a!) state, {_ROWS}) -> Tensor",
    _state_space,
)
_SEGMENTS = "(Tensor q, Tensor k, Tensor v, Tensor segment, Tensor real, float scale) -> Tensor"
register_op("attend_windows" + _SEGMENTS, _attend_windows)
register_op("attend_images" + _SEGMENTS.replace("Tensor real", "Tensor real, Tensor? ghost"), _attend_images)
register_op(
    "coded(Tensor x, Tensor codes, Tensor factor, Tensor? scale, Tensor? zero, Tensor? gather, Tensor? bias, "
    "Tensor? blocks, int kind, int columns, int group, bool rounds, int inputs, Tensor? room) -> Tensor",
    _quantised_linear,
)
