"""The fast CPU ops: packed linears, attention by row groups, filters only for rows that need them.

Unlike the reference they may read tensors on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.attention_plan import (
    AttendPlan,
    ChunkSpan,
    Group,
    Where,
    find_image_spans,
    get_plan,
    tile_mask,
)
from trencadis.backends.cpu.expert_mlp import SeparateExperts, run_chosen_experts
from trencadis.backends.cpu.int8_linear import IntegerWeight, integer_weight, product
from trencadis.backends.cpu.lora_adapter_products import AdapterOps
from trencadis.backends.cpu.native import attention_and_row_kernels as row_kernels
from trencadis.backends.cpu.native import dense_linear, quantised_weight_panels, weight_packing
from trencadis.backends.cpu.native.attention_and_row_kernels import rms_norm, silu_mul
from trencadis.backends.cpu.native.dense_linear import PackedWeight as PackedWeight
from trencadis.backends.cpu.native.dense_linear import by_sizes, pieces
from trencadis.backends.cpu.native.expert_kernels import Routing, run_few
from trencadis.backends.cpu.native.kernel_choice_by_cpu import ANY, KernelTable, Op, chosen_table
from trencadis.backends.cpu.native.quantised_weight_panels import DTYPE_NAMES, PanelWeight, panel_weight
from trencadis.backends.cpu.recorded_layers import ReplayOps
from trencadis.backends.cpu.recurrent_ops import RecurrentKernelOps
from trencadis.backends.cpu.reference_ops import CLAMPED_SWIGLU, ReferenceOps, apply_activation, clamped_swiglu
from trencadis.backends.cpu.sampler import cut_ordered, sample_in_parts
from trencadis.core.checkpoint.weight_source_interface import StoredRows
from trencadis.core.device.backend import (
    Attn,
    ExpertBiases,
    ExpertWeights,
    HeadTensors,
    HeadTensorsOut,
    LayerKV,
    Rotary,
    RotatedHeads,
    SamplerState,
    Segments,
    Weight,
    slots_at,
)
from trencadis.core.models import kv_cache_quantisation
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.vision_config import WINDOW_SLOTS

QUERY_TILE = 512
"""Number of queries of a chunk that share one mask, if there are stored tokens before the chunk."""

TOGETHER = 1 << 17
"""Minimum number of logits that are sampled together: few enough to stay in a core's cache, and worth the calls."""


class CpuOps(ReplayOps, RecurrentKernelOps, AdapterOps, ReferenceOps):
    """Implements ``core.device.backend.Ops`` for CPU tensors."""

    copies = True
    reads_rows = True
    every_row = False
    """True: own products take every number of rows that they can, so that a row's bits do not depend on the others."""

    pages: weight_packing.Pages = weight_packing.pages
    """Allocator of packed weights."""

    @cached_property
    def table(self) -> KernelTable:
        """The table of the kernels in use."""
        return chosen_table(self.every_row)

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        """Packs a weight; in oneDNN's layout if the CPU computes the dtype natively, up to 3 times faster from 8
        rows on.
        """
        rows = StoredRows([weight], [weight.shape[0]], weight.shape[1], weight.dtype)
        made = self.pack_stored(rows, bias)
        if made is not None:
            return made
        if not is_packable(weight.dtype):
            return super().pack_weight(weight.clone(), bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        bias = bias if bias is None else bias.contiguous()
        panels = dense_linear.panels_of(packed, weight, bias, self.table) or self._pack_panels(weight, bias)
        return PackedWeight(packed, bias, weight.shape[0], weight.shape[1], panels)

    def _pack_panels(self, weight: Tensor, bias: Tensor | None) -> dense_linear.Panels | None:
        """Packs a weight that oneDNN has packed in another layout again, for own products by tiles of few rows."""
        (outputs, inputs), dtype = weight.shape, weight.dtype
        if not self.table.by_tiles(Op.LINEAR, DTYPE_NAMES.get(dtype, "")):
            return None
        made = weight_packing.pack_rows(
            [weight.contiguous()], [outputs], inputs, dtype, self.table, self.pages, own_layout=True
        )
        if made is None:
            return None
        return dense_linear.panels_at(made.memory.data_ptr(), made.memory, outputs, inputs, dtype, bias, self.table)

    def pack_stored(self, rows: StoredRows, bias: Tensor | None) -> Weight | None:
        """Implements ``weight_source_interface.StoringOps``: packs in one pass by the library, if it knows oneDNN's
        layout.
        """
        if not is_packable(rows.dtype) and dense_linear.most_rows(self.table, rows.dtype) < ANY:
            return None
        made = weight_packing.pack_rows(rows.parts, rows.widths, rows.inputs, rows.dtype, self.table, self.pages)
        if made is None:
            return None
        bias, (outputs, inputs) = bias if bias is None else bias.contiguous(), (sum(rows.widths), rows.inputs)
        keep = made.memory if made.tensor is None else made.tensor
        panels = dense_linear.panels_at(made.memory.data_ptr(), keep, outputs, inputs, rows.dtype, bias, self.table)
        if made.tensor is None and panels is None:
            return None
        return PackedWeight(made.tensor, bias, outputs, inputs, panels)

    def keeps(self) -> bool:
        """Implements ``core.checkpoint.weight_source_interface.KeepingOps``."""
        return self.pages.has_cache

    def finish_loading(self) -> int:
        return self.pages.finish()

    def table_of(self, weight: Weight) -> Tensor | None:
        """Implements ``core.checkpoint.weight_source_interface.SharingOps``: the panels of a weight that own kernels
        multiply.
        """
        if not isinstance(weight, PackedWeight) or weight.panels is None:
            return None
        return dense_linear.table_of(weight.panels)

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Packs integers for own kernels, or else for torch's; if neither can be used, a weight of the engine's
        dtype.
        """
        made = panel_weight(q, bias, weight_packing.pages.take)
        return made or integer_weight(q, bias) or super().pack_quantised(q, bias)

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        if isinstance(w, PackedWeight):
            if w.panels is not None and dense_linear.is_supported(x, w.panels):
                return dense_linear.product(x, w.panels)
            if w.packed is None:
                assert w.panels is not None
                return dense_linear.product(x.contiguous(), w.panels)
            return by_sizes(x, lambda part: _product(part, w))
        return self._quantised_linear(x, w)

    def _quantised_linear(self, x: Tensor, w: Weight) -> Tensor:
        """Computes ``linear`` with integers, or with a weight of a dtype that oneDNN would emulate."""
        if isinstance(w, PanelWeight):
            return quantised_weight_panels.product(x, w)
        if isinstance(w, IntegerWeight):
            return product(x, w, by_sizes)
        return super().linear(x, w)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes the same as the reference; the sum is written to ``x``."""
        made = rms_norm(x, weight, eps, residual, self.table)
        return self._torch_rms_norm(x, weight, eps, residual) if made is None else (made, x)

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Implements ``core.models.model_and_ops_api.HeadNormOps``."""
        made = row_kernels.norm_heads(x, weight, eps, self.table)
        return self.rms_norm(x.reshape(-1, x.shape[2]), weight, eps)[0].view(x.shape) if made is None else made

    def _torch_rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes ``rms_norm`` without an own kernel."""
        total = x if residual is None else x.add_(residual)
        if x.dtype != torch.float32:
            return super().rms_norm(total, weight, eps)
        mean = torch.linalg.vector_norm(total, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1]).add_(eps)
        return (total * mean.rsqrt_()).mul_(weight), total

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes the same as the reference, rounded once; the sum is written to ``x``."""
        total = x if residual is None else x.add_(residual)
        return functional.layer_norm(total, weight.shape, weight, bias, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        made = silu_mul(gate_up, self.table)
        return self._act_mul(gate_up, "silu") if made is None else made

    def act(self, x: Tensor, kind: str) -> Tensor:
        """Computes the same as the reference; ``relu`` and ``relu2`` work in place."""
        return x.relu_() if kind == "relu" else x.relu_().square_() if kind == "relu2" else apply_activation(x, kind)

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        return self.silu_mul(gate_up) if kind == "silu" else self._act_mul(gate_up, kind)

    def _act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        """Computes ``act_mul`` without an own kernel."""
        gate, up = gate_up.chunk(2, dim=-1)
        if kind == CLAMPED_SWIGLU:
            own = None if self.every_row else row_kernels.clamped_swiglu(gate_up, self.table)
            return clamped_swiglu(gate, up) if own is None else own
        return self.act(gate, kind).mul_(up)

    def by_pieces(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Runs ``run`` in the pieces of ``by_sizes``, so that the values between two products stay in the cache.

        Each product would cut its rows in the same way, so that no bit changes. Products by tiles take all rows of a
        call at once.
        """
        sizes: Sequence[int] = pieces(len(x)) if len(x) > 1 else ()
        if len(sizes) > 1 and dense_linear.launches_tiles(self.table, x.dtype):
            sizes = [min(dense_linear.TILE_ROWS, len(x) - start) for start in range(0, len(x), dense_linear.TILE_ROWS)]
        return run(x) if len(sizes) < 2 else self._in_pieces(run, x, sizes)

    def _in_pieces(self, run: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Runs ``by_pieces`` for several pieces."""
        out, start = None, 0
        for size in sizes:
            y = run(x[start : start + size])
            if out is None:
                out = y.new_empty((len(x), y.shape[1]))
            out[start : start + len(y)] = y
            start += size
        assert out is not None
        return out

    def pack_experts(
        self, gate_up: Sequence[Tensor], down: Sequence[Tensor], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        ups, downs = (
            [self.pack_weight(*one) for one in zip(some, own, strict=True)]
            for some, own in zip((gate_up, down), _biases_of(biases, len(down)), strict=True)
        )
        return SeparateExperts(ups, downs, len(downs), down[0].shape[1])

    def pack_quantised_experts(
        self, gate_up: Sequence[Tensor | QTensor], down: Sequence[Tensor | QTensor],
        biases: ExpertBiases | None = None,
    ) -> SeparateExperts:  # fmt: skip
        """Implements ``core.models.moe.CodingOps``: packs each expert like any other weight."""
        held, total = list[list[Weight]](), 0
        for some, own in zip((gate_up, down), _biases_of(biases, len(down)), strict=True):
            held.append([])
            for one, bias in zip(some, own, strict=True):
                packed = self.pack_weight(one, bias) if isinstance(one, Tensor) else self.pack_quantised(one, bias)
                plain = one.shape[0] * one.shape[1] * one.dtype.itemsize
                total += getattr(packed, "nbytes", plain)
                held[-1].append(packed)
        return SeparateExperts(held[0], held[1], len(down), down[0].shape[1], total)

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        """Computes experts with the tokens grouped by expert; of few rows in one call of the library."""
        assert isinstance(w, SeparateExperts)
        asked = Routing(top, normalise, kind)
        made = None if self.every_row else run_few(x, scores, w.table, asked, self.table)
        return run_chosen_experts(self, x, scores, w, top, normalise, kind) if made is None else made

    def rotary(self, positions: Tensor, inv_freq: Tensor, axis: Tensor) -> Rotary:
        angle = positions.float().index_select(0, axis).t() * inv_freq
        cos, sin = angle.cos(), angle.sin()
        return Rotary(torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1))

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn) -> RotatedHeads:
        heads = q.shape[1]
        into = row_kernels.StoredKeys(v, kv, attn.slot_map) if row_kernels.can_store(v, kv) else None
        rotated = row_kernels.rotate(q, k, rotary.cos, rotary.sin, self.table, into)
        if rotated is None or into is None:
            rotated = row_kernels.torch_rotate(q, k, rotary.cos, rotary.sin) if rotated is None else rotated
            self._store(kv, rotated[:, heads:], v, attn.slot_map)
        return RotatedHeads(rotated[:, :heads], rotated[:, heads:], v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        plan = get_plan(attn, kv.k.shape[1], window=window, native=row_kernels.can_decode(q, kv, self.table))
        if row_kernels.can_attend(q, self.table) and (sinks is None or not plan.groups):
            return self._attend_parts(q, kv, plan, scale, window, sinks)
        if sinks is not None:
            return super().attend(q, k, v, kv, attn, scale, window, sinks)
        if not plan.surplus and plan.singles is None and len(plan.spans) + len(plan.groups) == 1:
            return _span(q, kv, plan.spans[0], scale, window) if plan.spans else _group(q, kv, plan.groups[0], scale)
        return self._attend_parts(q, kv, plan, scale, window)

    def _attend_parts(
        self, q: Tensor, kv: LayerKV, plan: AttendPlan, scale: float, window: int, sinks: Tensor | None = None
    ) -> Tensor:
        """Computes ``attend`` span by span and group by group."""
        out = torch.zeros(q.shape, dtype=q.dtype) if plan.surplus else torch.empty(q.shape, dtype=q.dtype)
        if plan.spans and row_kernels.can_attend(q, self.table):
            self._flash(q, kv, plan.spans, scale, window, out, sinks)
        else:
            for span in plan.spans:
                out[span.start : span.stop] = _span(q[span.start : span.stop], kv, span, scale, window)
        if plan.singles is not None:
            row_kernels.attend_decode(q, kv, plan.singles, scale, out, self.table, sinks)
        for group in plan.groups:
            out[group.rows] = _group(q[group.rows], kv, group, scale)
        return out

    def _flash(
        self, q: Tensor, kv: LayerKV, spans: Sequence[ChunkSpan], scale: float, window: int, out: Tensor,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        """Computes ``_span`` of all spans by the library's kernel; codes are decoded row by row."""
        if kv.k_scale is not None:
            for span in spans:
                keys, values = stored_at(kv, span.where, q.dtype)
                held = [span.to_flash_span(slice(0, len(keys)))]
                row_kernels.attend_spans(q, keys, values, held, scale, out, self.table, window, sinks)
        else:
            held, keys = [span.to_flash_span(span.where) for span in spans], kv.k.flatten(0, 1)
            row_kernels.attend_spans(q, keys, kv.v.flatten(0, 1), held, scale, out, self.table, window, sinks)

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        heads, made = q.shape[1], row_kernels.rotate(q, k, rotary.cos, rotary.sin, self.table)
        rotated = row_kernels.torch_rotate(q, k, rotary.cos, rotary.sin) if made is None else made
        return rotated[:, :heads], rotated[:, heads:]

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Computes attention inside windows. Padding slots give zeros, and their values are not read."""
        padded = bool((seg.real < WINDOW_SLOTS).any())
        if not row_kernels.can_attend(q, self.table, Op.WINDOWS):
            return self._torch_windows(q, k, v, seg.real if padded else None, scale)
        out = torch.zeros(q.shape, dtype=q.dtype) if padded else torch.empty(q.shape, dtype=q.dtype)
        row_kernels.attend_spans(q, k, v, row_kernels.window_spans(seg.real, WINDOW_SLOTS), scale, out, self.table)
        return out

    def _torch_windows(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scale: float) -> Tensor:
        """Computes ``attend_windows`` by torch; ``real``: int32 [windows], None if no slot is padding."""
        if real is None:
            return self._sdpa_windows(_by_window(q), _by_window(k), _by_window(v), None, scale).reshape(q.shape)
        inside = torch.arange(WINDOW_SLOTS) < real[:, None]
        outside = ~inside.view(-1, 1, 1)
        # A mask hides scores, but a NaN in a value makes a sum NaN even with a weight of zero.
        queries, keys, values = (_by_window(t.masked_fill(outside, 0)) for t in (q, k, v))
        out = self._sdpa_windows(queries, keys, values, inside[:, None, None], scale)
        return out.reshape(q.shape).masked_fill_(outside, 0)

    def _sdpa_windows(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Computes attention of [windows, h, 64, d] under a mask of keys, bool [windows, 1, 1, 64] -> [windows, 64,
        h, d].
        """
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Computes attention over whole images. Padding slots give zeros."""
        out = torch.zeros(q.shape, dtype=q.dtype)
        if row_kernels.can_attend(q, self.table):
            spans = [row_kernels.Span(queries_at, where, whole=True) for queries_at, where in find_image_spans(seg)]
            row_kernels.attend_spans(q, k, v, spans, scale, out, self.table)
            return out
        for queries_at, where in find_image_spans(seg):
            queries, keys, values = (t[at].transpose(0, 1)[None] for t, at in ((q, queries_at), (k, where), (v, where)))
            part = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[queries_at] = part[0].transpose(0, 1)
        return out

    def embed(
        self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
    ) -> Tensor:
        ids = torch.where(from_slot > 0, last[from_slot], tokens)
        x = functional.embedding(ids, table) if table.dim() == 2 else dense_linear.rows_of(table, ids)
        images = image_row.nonzero()[:, 0]
        return x.index_copy_(0, images, arena[image_row[images]]) if len(images) else x

    def best(self, logits: Tensor) -> Tensor:
        found = row_kernels.best(logits, self.table)
        return super().best(logits) if found is None else found

    def best_outputs(self, x: Tensor, w: Weight, outputs: int, scale: float) -> Tensor | None:
        """Returns codes of the best outputs (``dense_linear.best``) without storing the outputs; None without an own
        kernel.
        """
        if not isinstance(w, PackedWeight) or w.panels is None or w.bias is not None or x.dtype != w.panels.dtype:
            return None
        return dense_linear.best(x, w.panels, outputs, scale)

    def mask(self, logits: Tensor, head: HeadTensors) -> Tensor:
        """Overwrites the ids that a mask forbids, in rows that have a mask."""
        masks = head.masks.numpy()
        for i, row in enumerate(head.mask_row.tolist()):
            if row:
                forbidden = np.unpackbits(~masks[row], count=logits.shape[1], bitorder="little").view(bool)
                logits[i].masked_fill_(torch.from_numpy(forbidden), torch.finfo(logits.dtype).min)
        return logits

    def sample(self, logits: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> HeadTensorsOut:
        """Samples rows in parts of one row a thread, or several of a small vocabulary."""
        if not full:
            return super().sample(logits, head, state, full)
        given = bool((head.target >= 0).all())
        size = max(torch.get_num_threads(), TOGETHER // logits.shape[1])
        return sample_in_parts(logits, head, state, self.thresholds, self.update, given, size)

    def thresholds(self, probs: Tensor, head: HeadTensors) -> Tensor:
        """Computes thresholds; sorts only the rows that have a filter."""
        least = probs.new_zeros(len(probs), 1)
        asking = (head.temperature > 0) & ((head.top_k > 0) | (head.top_p < 1) | (head.min_p > 0))
        rows = asking.nonzero()[:, 0]
        if len(rows):
            ordered = sort_descending(probs[rows])
            least[rows] = cut_ordered(ordered, head.top_k[rows], head.top_p[rows], head.min_p[rows])
        return least


NUMPY_SORTS = 6
"""Numpy sorts about so many rows of a real vocabulary in the time of one of torch's, but all on one thread."""


def sort_descending(probs: Tensor) -> Tensor:
    """Sorts each row of probs, float32 [r, V], in descending order, by the faster of torch and numpy."""
    if len(probs) > NUMPY_SORTS * -(-len(probs) // torch.get_num_threads()):
        return probs.sort(-1, descending=True).values
    negated = np.negative(probs.numpy())
    negated.sort(axis=-1)
    return torch.from_numpy(np.negative(negated, out=negated))


def is_packable(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies ``dtype`` on this CPU without emulating it."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_avx512_bf16_supported())
    return dtype == torch.float32


def _biases_of(biases: ExpertBiases | None, experts: int) -> list[Sequence[Tensor | None]]:
    """Returns the biases of each expert's first and second product; None where it has none."""
    none = [None] * experts
    return [none, none] if biases is None else [biases.gate_up, biases.down]


def _by_window(x: Tensor) -> Tensor:
    """Rearranges [windows * 64, h, d] -> [windows, h, 64, d]."""
    return x.view(-1, WINDOW_SLOTS, *x.shape[1:]).transpose(1, 2)


def _product(x: Tensor, w: PackedWeight) -> Tensor:
    if w.panels is not None and dense_linear.is_supported(x, w.panels):
        return dense_linear.product(x, w.panels)
    assert w.packed is not None
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w.packed, w.bias, "none", [], "")
    return y


def _span(q: Tensor, kv: LayerKV, span: ChunkSpan, scale: float, window: int) -> Tensor:
    """Computes attention [n, h, d] of one row over its stored tokens; a stride of 0 repeats KV heads without a copy."""
    n, heads, d = q.shape
    groups = kv.k.shape[2]
    repeat = heads // groups
    queries = q.view(n, groups, repeat, d).permute(1, 2, 0, 3)
    stored = stored_at(kv, span.where, q.dtype)
    keys, values = (t.transpose(0, 1)[:, None].expand(-1, repeat, -1, -1) for t in stored)
    if span.whole or (span.context == 0 and span.upto is None and not 0 < window < n):
        out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=not span.whole, scale=scale)
    else:
        out = _tiles(queries, keys, values, span, scale, window)
    return out.permute(2, 0, 1, 3).reshape(n, heads, d)


def _tiles(queries: Tensor, keys: Tensor, values: Tensor, span: ChunkSpan, scale: float, window: int) -> Tensor:
    """Computes attention [g, h / g, n, d] under masks, which exist for ``QUERY_TILE`` queries at a time."""
    parts = []
    for start in range(0, queries.shape[2], QUERY_TILE):
        tile = queries[:, :, start : start + QUERY_TILE]
        first, end, mask = tile_mask(span, start, start + tile.shape[2], window)
        some = slice(first - span.first, end - span.first)
        parts.append(
            functional.scaled_dot_product_attention(
                tile, keys[:, :, some], values[:, :, some], attn_mask=mask[None, None], scale=scale
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _group(q: Tensor, kv: LayerKV, group: Group, scale: float) -> Tensor:
    """Computes attention [r, h, d] of single tokens: the query heads of a KV head become its queries; no key is
    repeated.
    """
    rows, heads, d = q.shape
    groups, stored = kv.k.shape[2], stored_at(kv, group.where, q.dtype)
    queries = q.view(rows, groups, heads // groups, d)
    keys, values = (t.view(rows, group.length, groups, d).transpose(1, 2) for t in stored)
    mask = group.mask.expand(-1, groups, heads // groups, -1) if group.mask is not None else None
    out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, d)


def stored_at(kv: LayerKV, where: Where, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns keys and values [L, g, d] of these slots, in ``dtype``; views of the cache if possible."""
    if kv.k_scale is not None:
        return kv_cache_quantisation.read_slots(kv, where, dtype)
    return slots_at(kv.k, where), slots_at(kv.v, where)
