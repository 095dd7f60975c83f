"""The ops on Gaudi: those of the reference where these are fast enough, else fused kernels and rectangular launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cpu.sampler import accepted_slots, apply_penalties, draw, sample_full
from trencadis.backends.hpu.attention import (
    block_decode_attention,
    prefill_attention,
    quantised_kv_cache,
    sliding_window_attention,
    vision_tower_attention,
)
from trencadis.backends.hpu.attention.attention_input_types import (
    AttentionKernels,
    FreshAttn,
    JoinedContext,
    SharedDecode,
    SlicedContext,
)
from trencadis.backends.hpu.attention.per_launch_attention_inputs import AttnPreparation, DecodeForm, SegmentPreparation
from trencadis.backends.hpu.attention.plain_attention import lowest
from trencadis.backends.hpu.fused_experts import (
    ListedExperts,
    ListedFp8Experts,
    check_experts,
    check_fp8_experts,
    list_experts,
    list_fp8_experts,
    route_by_topk,
    run_listed_experts,
    run_listed_fp8_experts,
)
from trencadis.backends.hpu.habana_bridge import Bridge
from trencadis.backends.hpu.hpu_quantised_linear import (
    TAKEN,
    Floats8Weight,
    PackedWeight4,
    floats8_weight,
    packed4_weight,
    round_tokens,
)
from trencadis.backends.hpu.hpu_recurrent_ops import (
    KeptLayer,
    KeptStates,
    StaticRecurrentOps,
    StaticRows,
    prepare,
    store_states,
)
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.joined_lora_adapters import JoinedAdapterOps, JoinedSlots
from trencadis.backends.hpu.launches.hpu_host_arrays import HEAD_TYPES, RESET_TYPES, convert_fields, leaves, rebuild
from trencadis.backends.hpu.launches.region_compiler import RegionCompiler, Regions, group_layers
from trencadis.backends.hpu.sampling_thresholds import find_thresholds
from trencadis.backends.hpu.shape_policy import pieces
from trencadis.core.device.backend import (
    Attn,
    ExpertBiases,
    ExpertWeights,
    HeadTensors,
    HeadTensorsOut,
    LayerKV,
    ResetTensors,
    Rotary,
    RotatedHeads,
    SamplerState,
    Segments,
    Weight,
)
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.quant.quantised_tensor import QTensor

T = TypeVar("T")

Note = Callable[[Tensor, HeadTensors, SamplerState, bool], None]
"""Stores drawn ids int64 [r]; True: and their counts."""

FUSED_ROWS = 3
"""Minimum number of dimensions that FusedRMSNorm takes."""


class DrawnCounts(NamedTuple):
    """Result of a compiled SAMPLE: the outputs, and the counts that a separate graph then stores."""

    out: HeadTensorsOut
    rows: Tensor  # int32 [r, V] counts of each row, including the id drawn now
    slot: Tensor  # int64 [r]
    counts: Tensor  # int32 [slots + 1, V]


class HpuOps(JoinedAdapterOps, StaticRecurrentOps, ReferenceOps):
    """``core.device.backend.Ops`` over a bridge.

    Args:
        run_layer: function that runs one layer of a stack, in lazy mode.
        dtype: of queries.
        windows: distinct sliding windows of the model's layers.
        window_groups: KV heads of this rank in the layers of each window; empty: the same in all layers.
        check_context: context manager around launches that check the card.
        values: False on a card without values, which nothing can be checked on.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: HpuSettings,
        block_size: int,
        run_layer: Callable[..., Any] = lambda run, *args: run(*args),
        dtype: torch.dtype = torch.bfloat16,
        windows: tuple[int, ...] = (0,),
        check_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        values: bool = True,
        window_groups: tuple[int, ...] = (),
    ) -> None:
        self.dtype, self.windows, self.window_groups = dtype, windows, window_groups
        self.bridge, self.settings, self.block_size = bridge, settings, block_size
        self._run_layer = run_layer
        fused, adjusts = settings.fused_sdpa, bridge.is_lazy() or settings.adjustment_compiled
        self.kernels = AttentionKernels(
            bridge.fused_sdpa if fused else None,
            bridge.sdpa_parts if fused else None,
            settings.fp32_products,
            settings.decode_parts,
            bridge.product,
            bridge.block_adjustment if settings.block_adjustment and adjusts else None,
            bridge.cast_to_fp8_v2,
            bridge.cast_from_fp8,
        )
        self.lazy = bridge.is_lazy()
        self.compiler = RegionCompiler(bridge, settings)
        self.regions = None if self.lazy or not settings.regional else Regions(self.compiler)
        self.check_context, self.values = check_context, values
        self.fused_experts: bool | None = None
        self.fused_fp8_experts: bool | None = None
        """True if the plug-in's operation for experts is used; None: not checked yet."""
        self._layers, self._inside = 0, False
        self._preparations: dict[DecodeForm, AttnPreparation] = {}
        self._segments = SegmentPreparation()
        self.adapter_slots = JoinedSlots(bridge.device, dtype)
        self._groups: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}
        self._kept: dict[int, KeptLayer] = {}

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Packs 8-bit floats as they are if the plug-in multiplies them, and 4 bits if it unpacks them.

        Other weights are converted to the engine's dtype on the host.
        """
        device, bridge = self.bridge.device, self.bridge
        if bridge.convert_from_uint4 is not None and q.dtype == torch.bfloat16 and q.scheme.bits == 4:
            packed = packed4_weight(q, bias, device)
            if packed is not None:
                return packed
        if q.data.dtype == torch.int8 or bridge.fp8_gemm_v2 is None or q.dtype not in TAKEN:
            return self.pack_weight(q.values().to(device), bias)
        return floats8_weight(q, bias, bridge.fp8_top, device)

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        if isinstance(w, PackedWeight4):
            return self._unpack_linear(x, w)
        if not isinstance(w, Floats8Weight):
            return super().linear(x, w)
        cast, multiply = self.bridge.cast_to_fp8_v2, self.bridge.fp8_gemm_v2
        assert cast is not None and multiply is not None
        scale = w.activation
        if scale is not None:
            codes = cast(x.clamp(-w.bound, w.bound), 1.0 / scale)
        else:
            codes, scale = round_tokens(x, self.bridge.fp8_top, cast)
        return multiply(codes, w.codes, x.dtype, scale, w.scale, w.bias)

    def _unpack_linear(self, x: Tensor, w: PackedWeight4) -> Tensor:
        """Dequantises the weight to bfloat16 for this product only."""
        opens = self.bridge.convert_from_uint4
        assert opens is not None
        rows = x if w.gather is None else x.index_select(1, w.gather)
        y = torch.matmul(rows, opens(w.codes, w.scale, w.zero, x.dtype))
        return y if w.bias is None else y + w.bias

    def pack_experts(
        self, gate_up: Sequence[Tensor], down: Sequence[Tensor], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        """Keeps each expert by itself where the plug-in's operation for experts can be used; else joins them."""
        if self.fused_experts is None:
            self.fused_experts = self.bridge.experts is not None and (not self.values or check_experts(self))
        if self.fused_experts and biases is None:
            return list_experts(gate_up, down)
        return super().pack_experts(gate_up, down, biases)

    def pack_quantised_experts(
        self, gate_up: Sequence[Tensor | QTensor], down: Sequence[Tensor | QTensor], biases: ExpertBiases | None = None
    ) -> ListedFp8Experts | None:
        """Implements ``core.models.moe.CodingOps``: keeps 8-bit floats where the plug-in's operation is right."""
        if self.fused_fp8_experts is None:
            usable = self.bridge.fp8_experts is not None and self.bridge.fp8_gemm_v2 is not None
            self.fused_fp8_experts = usable and (not self.values or check_fp8_experts(self))
        if not self.fused_fp8_experts or biases is not None:
            return None
        return list_fp8_experts(gate_up, down, self.bridge.fp8_top, self.bridge.device)

    route_tokens = staticmethod(route_by_topk)

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        if isinstance(w, ListedFp8Experts):
            return run_listed_fp8_experts(self, x, scores, w, top, normalise, kind)
        if not isinstance(w, ListedExperts):
            return super().experts(x, scores, w, top, normalise, kind)
        assert self.bridge.experts is not None
        return run_listed_experts(self.bridge.experts, self, x, scores, w, top, normalise, kind)

    def reference(self) -> ReferenceOps:
        """Returns ops over the CPU, to check against."""
        return ReferenceOps()

    def begin(self) -> None:
        """Starts a launch: layers are counted from here, so that its cuts are always at the same layers."""
        self._layers = 0

    def layer(self, run: Callable[..., T], *args: Any) -> T:
        """Runs one layer. In compile mode it is a region, shared by all layers of its kind and buckets of its shape; a
        layer with a state is followed by one that stores the state.
        """
        if self.regions is not None and len(args) > 2 and isinstance(args[2], StaticRows):
            kept = self._kept.setdefault(id(run), KeptLayer(run))
            return cast(T, self.region(kept, *args))
        if not self.lazy:
            return self.region(run, *args)
        out: T = self._run_layer(run, *args)
        return out

    def group_layers(self, layers: Sequence[Any], attn: Any, adapted: bool) -> Sequence[Any]:
        """Implements ``core.models.model_and_ops_api.GroupingOps``: in compile mode the layers of a DECODE launch
        without adapters run in regions of several.
        """
        size = self.settings.decode_layers
        decodes = isinstance(attn, SharedDecode) or (
            isinstance(attn, sliding_window_attention.PerWindow) and isinstance(attn.each[0], SharedDecode)
        )
        alone = adapted or size == 1 or not decodes or any(getattr(one, "recurrent", False) for one in layers)
        if self.regions is None or alone:
            return layers
        known = self._groups.get(id(layers))
        if known is None:
            known = self._groups[id(layers)] = (layers, group_layers(layers, size))
        return known[1]

    def region(self, run: Callable[..., T], *args: Any) -> T:
        if self.regions is None:
            return run(*args)
        self._inside = True
        try:
            out: Any = self.regions(run, *args)
        finally:
            self._inside = False
        if isinstance(out, DrawnCounts):
            self.by_rows(self._keep_counts, (out.slot, out.rows), out.counts)
            out = out.out
        if isinstance(out, KeptStates):
            self.region(store_states, out.slot, out.new, out.states)
            out = out.out
        found: T = out
        return found

    def by_rows(self, run: Callable[..., None], rows: tuple[Any, ...], *shared: Any) -> None:
        """Runs ``run`` over rows; in compile mode in pieces of few sizes (``shape_policy.PIECES``), shared by all
        launches.
        """
        if self.regions is None:
            run(*rows, *shared)
            return
        for piece in pieces(len(leaves(rows)[0])):
            cut = [None if item is None else rebuild(item, itemgetter(slice(*piece))) for item in rows]
            self.region(run, *cut, *shared)

    def _keep_counts(self, slot: Tensor, rows: Tensor, counts: Tensor) -> None:
        self.scatter_rows(counts, slot, rows)

    def first_residual(self, x: Tensor) -> Tensor | None:
        """Returns the residual of the first layer: zeros in compile mode, since None would be a second trace of every
        shape.
        """
        return None if self.lazy else torch.zeros_like(x)

    def embed(
        self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
    ) -> Tensor:
        """Looks rows up by ``index_select``, since the bridge's compiler leaves ``index`` out of its graphs."""
        ids = torch.where(from_slot > 0, last.index_select(0, from_slot), tokens)
        own, image = table.index_select(0, ids), arena.index_select(0, image_row)
        return torch.where((image_row > 0)[:, None], image, own)

    def patches(self, pixels: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        """Scales and shifts patches without ``addcmul``, which the bridge's compiler leaves out of its graphs."""
        return (pixels.float() * scale + shift).to(dtype)

    def gather_rows(self, source: Tensor, rows: Tensor) -> Tensor:
        return source.index_select(0, rows.long())

    def interpolate(self, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        return super().interpolate(table, rows.int(), weights)

    def scatter_rows(self, target: Tensor, rows: Tensor, values: Tensor) -> None:
        target.index_copy_(0, rows.long(), values)

    def reset(self, reset: ResetTensors, state: SamplerState) -> None:
        super().reset(convert_fields(reset, RESET_TYPES), state)

    def sample(self, logits: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> HeadTensorsOut:
        head = convert_fields(head, HEAD_TYPES)
        if not full:
            return super().sample(logits, head, state, False)
        return self._count(lambda note: sample_full(logits, head, state, self.thresholds, note), head, state)

    def draw(self, logits: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Implements ``core.models.model_and_ops_api.DrawingOps``."""
        head = convert_fields(inputs, HEAD_TYPES)
        scores, allowed = apply_penalties(logits.float(), head, state)
        return self._take(draw(scores, allowed, head, self.thresholds), head, state)

    def take_penalised(self, logits: Tensor, inputs: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Implements ``core.models.model_and_ops_api.PenalisingOps``."""
        head = convert_fields(inputs, HEAD_TYPES)
        scores, allowed = apply_penalties(logits.float(), head, state)
        return self._take(torch.where(allowed, scores, lowest(torch.float32)).argmax(-1), head, state)

    def thresholds(self, probs: Tensor, head: HeadTensors) -> Tensor:
        """Finds thresholds by bisection: a sort of the vocabulary would cost more than the rest of a draw."""
        return find_thresholds(probs, head.top_k, head.top_p, head.min_p)

    def _take(self, token: Tensor, head: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Stores given ids int64 [r], or the targets of rows that have one, and their counts."""

        def run(note: Note) -> HeadTensorsOut:
            chosen = torch.where(head.target >= 0, head.target, token)
            note(chosen, head, state, True)
            return HeadTensorsOut(chosen.int(), None, None, None, None)

        return self._count(run, head, state)

    def _count(
        self, run: Callable[[Note], HeadTensorsOut], head: HeadTensors, state: SamplerState
    ) -> HeadTensorsOut:  # fmt: skip
        """Runs a launch that stores the ids that it draws. Counts are read before they are stored, which in one
        compiled graph would rewrite those of every slot.

        Args:
            run: calls the function that it gets with the drawn ids.
        """
        if not self._inside:
            drawn = run(self.update)
            return drawn if self.lazy else _without_views(drawn)
        kept: list[Tensor] = []

        def note(token: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> None:
            self.update(token, head, state, False)
            kept.append(count_tokens(token, head, state))
            kept.append(head.slot if head.ahead is None else accepted_slots(token, head)[1])

        out: Any = DrawnCounts(_without_views(run(note)), kept[0], kept[1], state.counts)
        found: HeadTensorsOut = out
        return found

    def update(self, token: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> None:
        """Stores drawn ids. Whole rows of counts are stored, since an ``index_put_`` would rewrite the counts of every
        slot.
        """
        slot = accepted_slots(token, head)[1]
        state.last.index_copy_(0, slot, token.int())
        if full:
            state.counts.index_copy_(0, slot, count_tokens(token, head, state))

    def cut(self, kind: str) -> None:
        """Ends a recipe by ``mark_step``, which is called only here; does nothing in compile mode."""
        if not self.lazy:
            return
        if kind == "layer":
            self._layers += 1
            if not self.settings.cuts or self._layers % self.settings.cut_layers:
                return
        self.bridge.mark_step()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        fused = self.bridge.fused_rms_norm
        if fused is None or weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps, residual)
        total = x if residual is None else x + residual
        return fused(total[None] if total.dim() < FUSED_ROWS else total, weight, eps).view(total.shape), total

    def prepare_attn(self, attn: Attn, heads: int, kv: LayerKV) -> Any:
        """Computes masks and other attention inputs that are the same in every layer; in compile mode in one small
        region for each shape of a launch.
        """
        dtype = kv.k.dtype if kv.k_scale is None else self.dtype
        groups = self.window_groups or (kv.k.shape[1],) * len(self.windows)
        preparation = self._preparations.get(form := DecodeForm(heads, groups, dtype, self.settings.fp32_softmax))
        if preparation is None:
            slices = self.settings.context_slice
            preparation = AttnPreparation(form, self.windows, self.block_size, slices, self.kernels)
            if self.regions is not None:  # inside of a compiled body a changed dict would be another trace
                self._preparations[form] = preparation
        if not preparation.needed(attn):
            return attn
        return preparation.attach(attn, self.region(preparation.compute, attn))

    def prepare_segments(self, seg: Segments, merged: int = 1) -> Any:
        return self._segments.attach(seg, self.region(self._segments.compute, seg, merged))

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn) -> RotatedHeads:
        """Rotates q and k; stores keys and values in slots of the flat base tensors.

        A view of them could not be captured. Compiled, ``index_copy_`` on a graph's input is the one store that the
        bridge puts back in place; any other writes the whole cache anew.
        """
        cos, sin = rotary.cos[:, None], rotary.sin[:, None]
        rotated = self._rotate(k, cos, sin)
        with_slots: Any = attn  # every type that this backend fills has the slots of its tokens
        slot = with_slots.slot.long()
        if kv.k_scale is not None:
            stored = quantised_kv_cache.store(rotated, v, kv, slot, self.kernels)
            return RotatedHeads(self._rotate(q, cos, sin), *stored)
        kv.k.index_copy_(0, slot, rotated)
        kv.v.index_copy_(0, slot, v)
        return RotatedHeads(self._rotate(q, cos, sin), rotated, v)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates in float32: in bfloat16 neighbouring far positions would get the same factors."""
        rotary_kernel = self.bridge.apply_rotary
        return (rotary_kernel(x, cos, sin) if rotary_kernel is not None else rotate(x, cos, sin)).to(x.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        fp32, kernels, size = self.settings.fp32_softmax, self.kernels, self.block_size
        if sinks is not None:  # no fused kernel takes them
            kernels = kernels._replace(sdpa=None, parts=None, decode_parts=False, adjustment=None, sinks=sinks)
        if isinstance(attn, sliding_window_attention.PerWindow):
            attn = attn.each[attn.windows.index(window)]
        if isinstance(attn, FreshAttn):
            return prefill_attention.attend_fresh(q, k, v, attn, scale, fp32, kernels)
        if isinstance(attn, sliding_window_attention.MaskedRows):
            return sliding_window_attention.attend_fresh(q, k, v, attn, scale, fp32, kernels)
        if isinstance(attn, sliding_window_attention.WindowContext):
            keys, values = prefill_attention.stored_keys(kv, attn.near_slots, size, q.dtype, kernels)
            return sliding_window_attention.attend_window(q, k, v, (keys, values), attn, scale, fp32, kernels)
        if isinstance(attn, (JoinedContext, SlicedContext)):
            return prefill_attention.attend_context(q, k, v, kv, attn, size, scale, fp32, kernels)
        if isinstance(attn, SharedDecode):
            return block_decode_attention.attend_decode(q, kv, attn, size, scale, fp32, kernels)
        raise TypeError(f"{type(attn).__name__} was not filled by this backend")

    def prepare_recurrent(self, rows: RecurrentRows, attn: object) -> RecurrentRows:
        """Computes once a launch what all recurrent layers share; in compile mode in a region of its own."""
        tokens = len(cast(FreshAttn, attn).slot)  # every type that this backend fills has the slots of its tokens
        return cast(RecurrentRows, self.region(prepare, rows, tokens))

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        cos, sin = rotary.cos[:, None], rotary.sin[:, None]
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Any, scale: float) -> Tensor:
        return vision_tower_attention.attend_windows(
            q, k, v, seg, scale, self.settings.fp32_softmax_vision, self.kernels
        )

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Any, scale: float) -> Tensor:
        fp32 = self.settings.fp32_softmax_vision
        return vision_tower_attention.attend_images(q, k, v, seg, scale, fp32, self.kernels, lambda: self.cut("tile"))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding without the plug-in's kernel: the first half of the head against the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _without_views(drawn: HeadTensorsOut) -> HeadTensorsOut:
    """Returns results with memory of their own: a view that leaves a compiled function would be taken eagerly."""
    return drawn if drawn.logprob is None else drawn._replace(logprob=drawn.logprob.clone())


def count_tokens(token: Tensor, head: HeadTensors, state: SamplerState) -> Tensor:
    """Returns int32 [r, V]: the counts of each row's slot, including the id drawn now and the drafts before it."""
    counts = state.counts.index_select(0, head.slot)
    vocab = torch.arange(counts.shape[1], device=token.device, dtype=torch.int32)
    counts = counts + (vocab == token.int()[:, None])
    if head.ahead is None:
        return counts
    for draft in head.ahead.int().unbind(1):  # of those that a row accepts, each is another id or counts once more
        counts = counts + (vocab == draft[:, None])
    return counts
