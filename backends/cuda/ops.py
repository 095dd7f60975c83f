"""The ops of an NVIDIA card: Triton kernels where they are faster, torch's own for linears, the reference for the
rest.

Ops of a card that give a token the same bits whatever else is in its launch (``--batch-invariant``).

cuBLAS chooses a kernel, and with it an order of summation, by the number of rows: here rows are always multiplied in
full pieces of ``policy.INVARIANT_ROWS``. Attention of text has one kernel and one tile for every launch, since one run
may decode a token alone that another run computes in a mixed launch or a chunk; its keys are visited in spans that
begin at the row's first, and joined in their order by one program or by several. The other kernels compute one row at a
time anyway. This is slower, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from trencadis.backends.cpu.batch_invariant import ProbedOps
from trencadis.backends.cpu.recurrent_ops import EPS
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cpu.sampler import accepted_slots
from trencadis.backends.cuda.cpu_offloaded_layers import HostLayerOps
from trencadis.backends.cuda.kernels import (
    activation,
    attention_metadata,
    block_scaled_linear,
    causal_conv,
    cross_attend,
    delta_net_step,
    delta_rule,
    fused_moe,
    gather_scatter,
    input_embeddings,
    lora_shrink_expand,
    norms,
    paged_attention,
    quantised_kv_attention,
    quantised_linear,
    rotary_kernels,
    sample,
    tile_sizes,
    vision_attention,
)
from trencadis.backends.cuda.kernels.attention_metadata import (
    CrossAttentionItems,
    CudaSegments,
    ItemAttn,
    ItemRows,
    SingleAttn,
)
from trencadis.backends.cuda.kernels.layers import fused_layer, fused_rounding, skinny_gemm
from trencadis.backends.cuda.shape_policy import INVARIANT_ROWS as ROWS
from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight, pack_quantised_weight
from trencadis.backends.cuda.weights.stacked_experts import StackedExperts, stack_experts
from trencadis.core import envs
from trencadis.core.device.backend import (
    AdapterRows,
    AdapterWeights,
    Attn,
    ExpertBiases,
    ExpertWeights,
    HeadTensors,
    HeadTensorsOut,
    LayerKV,
    PackedAdapters,
    ResetTensors,
    Rotary,
    RotatedHeads,
    SamplerState,
    Segments,
    Weight,
)
from trencadis.core.device.launch_tensors import CrossAttentionTensors, RecurrentRows
from trencadis.core.models.decoder_layer import DecoderLayer
from trencadis.core.models.model_and_ops_api import DeltaNetWeights, RecurrentState
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import has_block_scales
from trencadis.core.vision_config import WINDOW_SLOTS

T = TypeVar("T")
DECODER_ARGS = 4
"""Arguments of a decoder layer whose rows have no adapters."""


SampleRows = Callable[[HeadTensors, SamplerState], HeadTensorsOut]


def sample_chains(inputs: HeadTensors, state: SamplerState, sample: SampleRows) -> HeadTensorsOut:
    """Samples r rows, some of which have drafts before them, and records what was accepted in ``state``.

    A row gets a copy of its slot's state, with the drafts before it counted; that of the last accepted row of a
    sequence becomes the slot's state. Static shapes, and no host reads.

    Args:
        inputs: with ``place`` and ``ahead``.
        sample: samples rows of slots of their own and records their ids in the state that it gets.
    """
    own = copy_states(inputs, state)
    alone = torch.arange(1, len(inputs.slot) + 1, device=inputs.slot.device)
    out = sample(inputs._replace(slot=alone, place=None, ahead=None), own)
    accepted = accepted_slots(out.token.long(), inputs)[1]
    state.last.index_copy_(0, accepted, out.token)
    state.counts.index_copy_(0, accepted, own.counts[1:])
    return out


def copy_states(inputs: HeadTensors, state: SamplerState) -> SamplerState:
    """Returns the sampler state of each row, from slot 1 on, after a copy of the sink."""
    assert inputs.ahead is not None
    slots = torch.nn.functional.pad(inputs.slot, (1, 0))
    last, counts, seen, bias_id, bias_value = (t.index_select(0, slots) for t in state)
    ahead = inputs.ahead
    counts[1:].scatter_add_(1, ahead.clamp_min(0), (ahead >= 0).to(counts.dtype))
    return SamplerState(last, counts, seen, bias_id, bias_value)


class CudaOps(HostLayerOps, ReferenceOps):
    """``core.device.backend.Ops``.

    Outputs and partial results come from torch's caching allocator (in a capture, from the graph's own pool); nothing
    is read from the device. Layers whose weights alternate in two buffers run op by op: their copies are ordered by
    layer.
    """

    whole_layers: ClassVar[bool] = True
    """True if these ops may run decoder layers of few tokens as ``kernels.layers.fused_layer``."""
    gathers = False
    alike: ClassVar[bool] = False
    """True if a query's sums over an image run in the same order in all launches."""

    query_group: int = 0
    """Query heads per KV head by which blocks of queries were planned; 0: each layer's own, which is then the same."""
    _arrived: Tensor | None = None

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        """Packs a weight as ``backend.Ops`` says.

        The first call also allocates the counters of fused layers: a capture would take them from the pool of its
        graph.
        """
        self._allocate_counters(weight.device)
        return super().pack_weight(weight, bias)

    def _allocate_counters(self, device: torch.device) -> None:
        if self._arrived is None and self.whole_layers and envs.get_bool("TRENCADIS_CUDA_WHOLE_LAYERS"):
            self._arrived = skinny_gemm.counters(device)

    @property
    def fuses_layers(self) -> bool:
        """True unless the switch is off, layers lie in host memory, or no weight has been packed."""
        return self._arrived is not None and self.host_layers is None

    def layer(self, run: Callable[..., T], *args: Any) -> T:
        """Runs a layer as ``backend.Ops`` says; a decoder layer of few tokens without adapters in six launches if it
        can be fused, and one of more tokens whose products round their activations within the kernels before them.
        """
        if not self.fuses_layers or len(args) != DECODER_ARGS:
            return super().layer(run, *args)
        assert self._arrived is not None
        made: Any = run
        if fused_layer.can_fuse(run, args[0], args[-1], args[-2]):
            made = fused_layer.FusedLayer(cast(DecoderLayer, run), self._arrived, self.query_group)
        elif fused_rounding.can_fuse(run, args[0]):
            made = fused_rounding.RoundingLayer(cast(DecoderLayer, run))
        return super().layer(made, *args)  # type: ignore[no-any-return]

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Packs the codes unchanged, with their scales."""
        self._allocate_counters(q.data.device)
        device = q.data.device
        if has_block_scales(q.scheme, *q.shape):
            block_scaled_linear.try_product(device, q.dtype)
        return pack_quantised_weight(q, bias, tile_sizes.arch_of(device), block_scaled_linear.possible(device))

    def prepare_adapters(self, slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return slot

    def add_adapters(self, y: Tensor, x: Tensor, w: AdapterWeights | PackedAdapters, rows: AdapterRows) -> Tensor:
        assert isinstance(rows, Tensor) and isinstance(w, AdapterWeights)
        lora_shrink_expand.add(y, x.contiguous(), rows, w)
        return y

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        return quantised_linear.linear(x, w) if isinstance(w, QuantisedWeight) else super().linear(x, w)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x.contiguous()  # the queries of one token beside their gates are a view with gaps
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        norms.rms_norm(x, residual, weight, eps, total, out)
        return out, total

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        norms.layer_norm(x, residual, weight, bias, eps, total, out)
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        activation.silu_mul(gate_up, out)
        return out

    def act(self, x: Tensor, kind: str) -> Tensor:
        out = torch.empty_like(x)
        activation.launch(x, kind, False, out)
        return out

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        if kind == "silu":
            return self.silu_mul(gate_up)
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        activation.launch(gate_up, kind, True, out)
        return out

    def pack_experts(
        self, gate_up: Sequence[Tensor], down: Sequence[Tensor], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        return stack_experts(gate_up, down, biases, tile_sizes.arch_of(down[0].device))

    def pack_quantised_experts(
        self, gate_up: Sequence[Tensor | QTensor], down: Sequence[Tensor | QTensor], biases: ExpertBiases | None = None
    ) -> StackedExperts:
        """Implements ``core.models.moe.CodingOps``: packs the codes of each expert unchanged, with their scales."""
        return stack_experts(gate_up, down, biases, tile_sizes.arch_of(down[0].device))

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        assert isinstance(w, StackedExperts)
        return fused_moe.run(x, scores, w, top, normalise, kind)

    def rotary(self, positions: Tensor, inv_freq: Tensor, axis: Tensor) -> Rotary:
        shape = positions.shape[1], 2 * inv_freq.shape[0]
        cos, sin = (torch.empty(shape, dtype=torch.float32, device=positions.device) for _ in range(2))
        rotary_kernels.rotary(positions, inv_freq, axis, cos, sin)
        return Rotary(cos, sin)

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn) -> RotatedHeads:
        out = q.new_empty(q.shape)
        if kv.k_scale is not None:
            rotated = k.new_empty(k.shape)
            rotary_kernels.rope_vision(q, k, rotary.cos, rotary.sin, out, rotated)
            quantised_kv_attention.store(rotated, v, kv, attn.slot_map)
            return RotatedHeads(out, k, v)
        rotary_kernels.rope_store(q, k, v, rotary.cos, rotary.sin, kv.k, kv.v, attn.slot_map, out)
        return RotatedHeads(out, k, v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert isinstance(attn, ItemAttn)
        out, partial = q.new_empty(q.shape), paged_attention.partial(attn, q, kv)
        paged_attention.attend_text(
            q, kv, attn, scale, out, partial, window=window, sinks=sinks, planned=self.query_group
        )
        return out

    def cross_attend(
        self, q: Tensor, held: Tensor, rows: Tensor | None, images: CrossAttentionTensors, scale: float
    ) -> Tensor:
        """Implements ``core.models.model_and_ops_api.CrossAttentionOps``; the kernel reads rows in the arena."""
        assert isinstance(images, CrossAttentionItems)
        out, (k, v) = q.new_empty(q.shape), torch.split(held, held.shape[1] // 2, dim=1)
        results = cross_attend.span_results(images, q, k.shape[1] // q.shape[2])
        cross_attend.cross_attend(q, k, v, images, scale, out, results)
        return out

    def prepare_recurrent(self, rows: RecurrentRows, attn: Attn) -> RecurrentRows:
        """Lists the chunks of a launch once for all layers; a launch with one token per row has none."""
        single = isinstance(attn, SingleAttn)
        found = rows if single else attention_metadata.item_rows(rows, attn.row_start, len(attn.slot_map))
        return cast(RecurrentRows, found)

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: object, attn: Attn, activation: str
    ) -> Tensor:
        assert isinstance(rows, RecurrentRows | ItemRows)
        out = x.new_empty(x.shape)
        causal_conv.launch(x, weight, bias, state, rows, activation, out)
        return out

    def delta_net(
        self, x: Tensor, gates: Tensor, w: DeltaNetWeights, held: RecurrentState, rows: object, attn: Attn
    ) -> Tensor | None:
        """Implements ``core.models.model_and_ops_api.FusedDeltaOps`` for rows of one token each."""
        if not delta_net_step.fits(w, held, rows):
            return None
        return delta_net_step.run(x, gates, w, held, cast(RecurrentRows, rows), EPS)

    def gated_norm(self, y: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
        out = torch.empty_like(y, memory_format=torch.contiguous_format)
        norms.gate_rows(y.contiguous(), gate.view(y.shape), weight, eps, out)
        return out.flatten(1)

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """Implements ``core.models.model_and_ops_api.GatingOps``."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        norms.gate_rows(x.contiguous(), gate, None, 0.0, out)
        return out

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: object, attn: Attn
    ) -> Tensor:
        assert isinstance(rows, RecurrentRows | ItemRows)
        if not delta_rule.is_supported(k.shape[2], v.shape[2]):
            return super().delta_rule(q, k, v, g, beta, state, RecurrentRows(*rows[:4]), attn)
        out = v.new_empty(v.shape) if isinstance(rows, RecurrentRows) else v.new_zeros(v.shape)
        delta_rule.launch(q, k, v, g, beta, state, rows, out, EPS)
        return out

    def state_space(
        self, c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor, state: Tensor, rows: object, attn: Attn
    ) -> Tensor:
        assert isinstance(rows, RecurrentRows | ItemRows)
        if not delta_rule.is_supported(b.shape[2], x.shape[2]):
            return super().state_space(c, b, x, g, step, state, RecurrentRows(*rows[:4]), attn)
        out = x.new_empty(x.shape) if isinstance(rows, RecurrentRows) else x.new_zeros(x.shape)
        delta_rule.launch(c, b, x, g, step, state, rows, out, EPS, delta=False)
        return out

    def patches(self, pixels: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(pixels.shape[0], scale.numel(), dtype=dtype, device=pixels.device)
        input_embeddings.normalise_pixels(pixels, scale, shift, out)
        return out

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
        rotary_kernels.rope_vision(q, k, rotary.cos, rotary.sin, q_out, k_out)
        return q_out, k_out

    def prepare_segments(self, seg: Segments, merged: int = 1) -> Segments:
        """Returns ``seg``, with fewer real slots in each window and thus no whole one if rows are ``merged``."""
        few = super().prepare_segments(seg, merged)
        return few if merged == 1 or not isinstance(few, CudaSegments) else few._replace(whole=few.first)

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        assert isinstance(seg, CudaSegments)
        out = q.new_empty(q.shape)
        vision_attention.attend_windows(q, k, v, seg, scale, out)
        return out

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        assert isinstance(seg, CudaSegments)
        out = q.new_empty(q.shape)
        vision_attention.attend_images(q, k, v, seg, scale, out, alike=self.alike)
        return out if seg.padding_window is None else self._mask_padding_windows(q, k, v, seg, scale, out)

    def _mask_padding_windows(
        self, q: Tensor, k: Tensor, v: Tensor, seg: CudaSegments, scale: float, attended: Tensor
    ) -> Tensor:
        """Returns ``attended``, in which padding windows attend as if the other padding windows were empty."""
        assert seg.padding_window is not None and seg.solid is not None
        assert seg.solid_whole is not None and seg.solid_order is not None
        solid, out = seg._replace(real=seg.solid, whole=seg.solid_whole, order=seg.solid_order), q.new_empty(q.shape)
        vision_attention.attend_images(q, k, v, solid, scale, out, alike=self.alike)
        padding_window = (seg.padding_window > 0).repeat_interleave(WINDOW_SLOTS, output_size=len(q))
        return torch.where(padding_window[:, None, None], out, attended)

    def embed(
        self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
    ) -> Tensor:
        out = table.new_empty(tokens.shape[0], table.shape[1])
        input_embeddings.embed_tokens(tokens, from_slot, last, image_row, arena, table, out)
        return out

    def gather_rows(self, source: Tensor, index: Tensor) -> Tensor:
        out = source.new_empty(index.shape[0], source.shape[1])
        gather_scatter.gather(source, index, out)
        return out

    def interpolate(self, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        out = table.new_empty(rows.shape[0], table.shape[1])
        gather_scatter.mix(table, rows, weights, out)
        return out

    def scatter_rows(self, target: Tensor, index: Tensor, values: Tensor) -> None:
        gather_scatter.scatter(target, index, values)

    def sample(self, logits: Tensor, inputs: HeadTensors, state: SamplerState, full: bool) -> HeadTensorsOut:
        if inputs.ahead is not None:
            return sample_chains(inputs, state, lambda head, own: self.sample(logits, head, own, full))
        size = logits.shape[0], logits.shape[1], logits.device
        out = sample.outputs(*size, full)
        if full:
            sample.draw_with_logprobs(logits, inputs, state, sample.scratch(*size), out)
        else:
            sample.pick_greedy(logits, inputs, state, sample.greedy_scratch(*size), out)
        return out

    def draw(self, logits: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        size = logits.shape[0], logits.shape[1], logits.device
        out = sample.outputs(*size, False)
        sample.draw_tokens(logits, inputs, state, sample.scratch(*size, with_logprobs=False), out)
        return out

    def reset(self, inputs: ResetTensors, state: SamplerState) -> None:
        sample.reset_slots(inputs, state)


class InvariantCudaOps(ProbedOps, CudaOps):
    """Implements ``core.device.backend.Ops`` for a card so that a token gets the same bits in any launch."""

    whole_layers, alike = False, True
    shift, probes = 5, (1, 7, ROWS, 2 * ROWS + 40)

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        rows = len(x)
        if rows % ROWS:
            x = torch.cat([x, x.new_zeros(-rows % ROWS, x.shape[1])])
        parts = [super(InvariantCudaOps, self).linear(part, w) for part in torch.split(x, ROWS)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        assert isinstance(w, StackedExperts)
        return fused_moe.run(x, scores, w, top, normalise, kind, alike=True)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert isinstance(attn, ItemAttn)
        out, partial = q.new_empty(q.shape), paged_attention.partial(attn, q, kv, alike=True)
        paged_attention.attend_text(
            q, kv, attn, scale, out, partial, alike=True, window=window, sinks=sinks, planned=self.query_group
        )
        return out
