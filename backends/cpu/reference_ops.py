"""The reference: every op in plain torch, with static shapes and without reading a tensor on the host.

Other devices inherit it and override the ops that they have faster kernels for. Letters as in ``backend.Ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.expert_mlp import (
    JoinedExperts,
    RoutedTokens,
    join_experts,
    route_tokens,
    run_all_experts,
)
from trencadis.backends.cpu.lora_adapter_products import add_masked_adapters, mask_slots
from trencadis.backends.cpu.recurrent_ops import RecurrentReference
from trencadis.backends.cpu.sampler import sample_full, thresholds, unpack, update
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
from trencadis.core.device.launch_tensors import CrossAttentionTensors, put_slots
from trencadis.core.models import kv_cache_quantisation
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.vision_config import WINDOW_SLOTS

T = TypeVar("T")

QUERY_TILE = 64
IMAGE_TILE = 1024

SCORES = 1 << 25
"""Number of scores over rows of images that are held at a time."""


CLAMPED_SWIGLU, CLAMP, GAIN = "clamped_swiglu", 7.0, 1.702


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns ``act_mul`` for ``clamped_swiglu``."""
    gate = gate.clamp(max=CLAMP)
    return (up.clamp(-CLAMP, CLAMP) + 1) * (gate * torch.sigmoid(GAIN * gate))


@dataclass(slots=True)
class PlainWeight:
    """A weight as it is stored: [out, in], and a bias [out] if it has one."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int


class ReferenceOps(RecurrentReference):
    """Implements ``core.device.backend.Ops``; the recurrent ops are in their own file."""

    copies = False
    gathers = True

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        return PlainWeight(weight, bias, weight.shape[0], weight.shape[1])

    def pack_quantised(self, q: QTensor, bias: Tensor | None = None) -> Weight:
        """Dequantises the weight to the engine's dtype and packs it."""
        return self.pack_weight(q.values(), bias)

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        assert isinstance(w, PlainWeight)
        return functional.linear(x, w.weight, w.bias)

    def prepare_adapters(self, slot: Tensor, numbers: Tensor, dtype: torch.dtype) -> AdapterRows:
        """Returns the mask [n, slots] of each token's slot."""
        return mask_slots(slot, numbers, dtype)

    def add_adapters(self, y: Tensor, x: Tensor, w: AdapterWeights | PackedAdapters, rows: AdapterRows) -> Tensor:
        """Multiplies by A of all slots, masks the products of other slots, and multiplies by B of all slots."""
        assert isinstance(rows, Tensor) and isinstance(w, AdapterWeights)
        return add_masked_adapters(y, x, w, rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        wide = total.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if weight.dtype != x.dtype:
            return (weight * normed).to(x.dtype), total
        return weight * normed.to(x.dtype), total

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        wide = functional.layer_norm(total.float(), weight.shape, weight.float(), bias.float(), eps)
        return wide.to(x.dtype), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def act(self, x: Tensor, kind: str) -> Tensor:
        return apply_activation(x, kind)

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        if kind == "silu":
            return self.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        if kind == CLAMPED_SWIGLU:
            return clamped_swiglu(gate, up)
        return self.act(gate, kind) * up

    def pack_experts(
        self, gate_up: Sequence[Tensor], down: Sequence[Tensor], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        return join_experts(gate_up, down, biases)

    def route_tokens(self, scores: Tensor, top: int, normalise: bool) -> RoutedTokens:
        """Chooses the experts of each token; a device without 64-bit integers has its own way."""
        return route_tokens(scores, top, normalise)

    def experts(self, x: Tensor, scores: Tensor, w: ExpertWeights, top: int, normalise: bool, kind: str) -> Tensor:
        assert isinstance(w, JoinedExperts)
        return run_all_experts(self, x, scores, w, top, normalise, kind)

    def rotary(self, positions: Tensor, inv_freq: Tensor, axis: Tensor) -> Rotary:
        angle = positions.float().index_select(0, axis).t() * inv_freq
        both = torch.cat([angle, angle], dim=-1)
        return Rotary(both.cos(), both.sin())

    def prepare_attn(self, attn: Attn, heads: int, kv: LayerKV) -> Attn:
        return attn

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn) -> RotatedHeads:
        cos, sin = rotary.cos.to(q.dtype), rotary.sin.to(q.dtype)
        k = _rotate(k, cos, sin)
        self._store(kv, k, v, attn.slot_map)
        return RotatedHeads(_rotate(q, cos, sin), k, v)

    def _store(self, kv: LayerKV, k: Tensor, v: Tensor, slot_map: Tensor) -> None:
        if kv.k_scale is not None:
            kv_cache_quantisation.store(k, v, kv, slot_map)
            return
        put_slots(kv.k, k, slot_map)
        put_slots(kv.v, v, slot_map)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float, window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes attention [n, h, d]: each token sees its row's stored tokens up to itself, or up to ``upto``."""
        n, heads, d = q.shape
        token = torch.arange(n, device=q.device, dtype=torch.int32)
        row = torch.searchsorted(attn.row_start[1:-1].contiguous(), token, right=True)
        position = attn.context[row] + token - attn.row_start[row]
        last = position if attn.upto is None else attn.upto
        groups = kv.k.shape[2]
        out = []
        for start in range(0, n, QUERY_TILE):
            rows = row[start : start + QUERY_TILE]
            blocks = attn.blocks[rows].long()
            keys, values = _gather_stored(kv, blocks)  # [tile, L, g, d]
            queries = q[start : start + QUERY_TILE].float().view(-1, groups, heads // groups, d)
            scores = torch.einsum("tgrd,tlgd->tgrl", queries, keys) * scale
            key = torch.arange(keys.shape[1], device=q.device)
            hidden = key > last[start : start + QUERY_TILE, None]
            if window:
                hidden |= key <= position[start : start + QUERY_TILE, None] - window
            scores = scores.masked_fill(hidden[:, None, None], lowest())
            if sinks is not None:
                own = sinks.view(1, groups, -1, 1).expand(len(scores), -1, -1, -1)
                scores = torch.cat([scores, own], dim=-1)
            weights = scores.softmax(-1)[..., : keys.shape[1]]
            out.append(torch.einsum("tgrl,tlgd->tgrd", weights, values).reshape(-1, heads, d))
        return torch.cat(out).to(q.dtype)

    def cross_attend(
        self, q: Tensor, held: Tensor, rows: Tensor | None, images: CrossAttentionTensors, scale: float
    ) -> Tensor:
        """Implements ``core.models.model_and_ops_api.CrossAttentionOps``: gathers keys and values."""
        assert rows is not None
        units, d = len(images.units), q.shape[2]
        k, v = (
            part.index_select(0, rows).view(units, len(rows) // units, -1, d)
            for part in torch.split(held, held.shape[1] // 2, dim=1)
        )
        return self.cross_attend_rows(q, k, v, images, scale)

    def cross_attend_rows(self, q: Tensor, k: Tensor, v: Tensor, images: CrossAttentionTensors, scale: float) -> Tensor:
        """Implements ``core.models.model_and_ops_api.CrossAttentionOps``, a tile of queries at a time."""
        (n, heads, d), (units, length, groups, _) = q.shape, k.shape
        keys, values = k.flatten(0, 1).permute(1, 2, 0), v.flatten(0, 1).transpose(0, 1)  # [g, d, L], [g, L, d]
        queries = q.view(n, groups, heads // groups, d).transpose(0, 1)
        position = torch.arange(length, device=q.device, dtype=torch.int32)
        often = images.times.clamp(min=1).float().log()
        size, out = max(SCORES // (heads * units * length), 1), []
        for start in range(0, n, size):
            tile = slice(start, start + size)
            some = queries[:, tile]
            scores = (some.flatten(1, 2) @ keys).float() * scale
            scores = scores.view(groups, some.shape[1], -1, units, length) + often[tile, None, :, None]
            hidden = position >= images.reach[tile, :, None]
            scores = scores.masked_fill(hidden[None, :, None], lowest()).flatten(3)
            found = scores.softmax(-1).to(v.dtype).flatten(1, 2) @ values
            out.append(found.view(groups, some.shape[1], -1, d).transpose(0, 1).reshape(-1, heads, d))
        return out[0] if len(out) == 1 else torch.cat(out)

    def patches(self, pixels: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        missing = scale.numel() - pixels.shape[1]
        if missing:
            pixels = functional.pad(pixels, (0, missing))
        return torch.addcmul(shift, pixels.float(), scale).to(dtype)

    def prepare_segments(self, seg: Segments, merged: int = 1) -> Segments:
        return seg if merged == 1 else seg._replace(real=seg.real // merged)

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        return (
            _rotate(q.float(), rotary.cos, rotary.sin).to(q.dtype),
            _rotate(k.float(), rotary.cos, rotary.sin).to(k.dtype),
        )

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Computes attention [s, h, d]: each slot sees the real slots of its window."""
        s, heads, d = q.shape
        windows = (s // WINDOW_SLOTS, WINDOW_SLOTS, heads, d)
        queries, keys, values = (t.float().view(windows).transpose(1, 2) for t in (q, k, v))
        hidden = torch.arange(WINDOW_SLOTS, device=q.device) >= seg.real[:, None]
        scores = queries @ keys.transpose(2, 3) * scale
        weights = scores.masked_fill(hidden[:, None, None], lowest()).softmax(-1)
        return (weights @ values).transpose(1, 2).reshape(s, heads, d).to(q.dtype)

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        """Computes attention [s, h, d] in tiles of queries: each slot sees the real slots of its image.

        Padding windows do not see other padding windows.
        """
        s = q.shape[0]
        owner = seg.segment.repeat_interleave(WINDOW_SLOTS, output_size=s)
        real = seg.real.repeat_interleave(WINDOW_SLOTS, output_size=s)
        unreal = torch.arange(s, device=q.device) % WINDOW_SLOTS >= real
        padding_window = (
            None
            if seg.padding_window is None
            else (seg.padding_window > 0).repeat_interleave(WINDOW_SLOTS, output_size=s)
        )
        keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
        out = []
        for start in range(0, s, IMAGE_TILE):
            hidden = (owner[start : start + IMAGE_TILE, None] != owner) | unreal
            if padding_window is not None:
                hidden = hidden | (padding_window[start : start + IMAGE_TILE, None] & padding_window)
            scores = q[start : start + IMAGE_TILE].float().transpose(0, 1) @ keys * scale
            out.append((scores.masked_fill(hidden, lowest()).softmax(-1) @ values).transpose(0, 1))
            self.cut("tile")
        return torch.cat(out).to(q.dtype)

    def embed(
        self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
    ) -> Tensor:
        ids = torch.where(from_slot > 0, last[from_slot.long()], tokens)
        return torch.where((image_row > 0)[:, None], arena[image_row.long()], table[ids.long()])

    def gather_rows(self, source: Tensor, rows: Tensor) -> Tensor:
        return source.index_select(0, rows)

    def interpolate(self, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Interpolates one row of the table at a time, so that no tensor holds all of them."""
        out = table.index_select(0, rows[:, 0]).float() * weights[:, :1]
        for i in range(1, rows.shape[1]):
            out = out + table.index_select(0, rows[:, i]).float() * weights[:, i : i + 1]
        return out.to(table.dtype)

    def scatter_rows(self, target: Tensor, rows: Tensor, values: Tensor) -> None:
        target.index_copy_(0, rows, values)

    def sample(self, logits: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> HeadTensorsOut:
        if full:
            return sample_full(logits, head, state, self.thresholds, self.update)
        return self.take(self.best(logits), head, state)

    def take(self, token: Tensor, head: HeadTensors, state: SamplerState) -> HeadTensorsOut:
        """Implements ``core.models.model_and_ops_api.BestOps``: stores given ids as drawn."""
        self.update(token, head, state, full=False)
        return HeadTensorsOut(token.int(), None, None, None, None)

    def best_outputs(self, x: Tensor, w: Weight, outputs: int, scale: float) -> Tensor | None:
        """Implements ``core.models.model_and_ops_api.BestOps``: returns None, since the logits are needed."""
        return None

    def best(self, logits: Tensor) -> Tensor:
        """Returns int64 [r]: the index of the first largest logit of each row."""
        return logits.argmax(-1)

    def mask(self, logits: Tensor, head: HeadTensors) -> Tensor:
        """Implements ``core.models.model_and_ops_api.MaskingOps``."""
        allowed = unpack(head.masks.index_select(0, head.mask_row), logits.shape[1])
        return torch.where(allowed, logits, torch.finfo(logits.dtype).min)

    def pool(self, x: Tensor, group: Tensor, head: Tensor | None) -> Tensor:
        """Sums rows by group, as a product with a matrix of zeros and ones; non-finite values are left out and
        marked afterwards.
        """
        wide = x.float()
        fine = wide.abs() <= torch.finfo(torch.float32).max
        ids = torch.arange(1, x.shape[0] + 1, device=x.device, dtype=torch.int32)
        member = (group[None, :] == ids[:, None]).float()
        sums = member @ torch.where(fine, wide, 0.0)
        spoiled = member @ (~fine).float().amax(-1, keepdim=True)
        out = sums if head is None else functional.linear(sums, head)
        whole = (spoiled <= 0).float()
        return out * (whole / whole)  # 0 / 0 is NaN; a literal NaN would be left out of a Gaudi's compiled graphs

    update = staticmethod(update)

    def thresholds(self, probs: Tensor, head: HeadTensors) -> Tensor:
        """Returns [r, 1]: the least probability that top-k, top-p and min-p let through; 0 without filters."""
        return thresholds(probs, head.top_k, head.top_p, head.min_p)

    def reset(self, reset: ResetTensors, state: SamplerState) -> None:
        state.counts.index_copy_(0, reset.slot, reset.counts)
        state.prompt_mask.index_copy_(0, reset.slot, reset.prompt_mask)
        state.bias_id.index_copy_(0, reset.slot, reset.bias_id)
        state.bias_value.index_copy_(0, reset.slot, reset.bias_value)

    def layer(self, run: Callable[..., T], *args: Any) -> T:
        return run(*args)

    def first_residual(self, x: Tensor) -> Tensor | None:
        return None

    def region(self, run: Callable[..., T], *args: Any) -> T:
        return run(*args)

    def by_rows(self, run: Callable[..., None], rows: tuple[Any, ...], *shared: Any) -> None:
        run(*rows, *shared)

    def by_pieces(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x)

    def cut(self, kind: str) -> None:
        """Does nothing: only devices that build graphs cut them."""


def apply_activation(x: Tensor, kind: str) -> Tensor:
    """Applies the activation with this name of ``core.device.backend.Ops.act``.

    GELU and its two approximations are those of arXiv 1606.08415, section 2.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"no activation is called {kind}")
    return ACTIVATIONS[kind](x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def lowest() -> float:
    """Returns the score of a masked key: finite, so that a row whose keys are all masked has no NaN."""
    return torch.finfo(torch.float32).min


def _gather_stored(kv: LayerKV, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values of the blocks [tile, width], float32 [tile, L, g, d] each."""
    if kv.k_scale is None:
        return kv.k[blocks].flatten(1, 2).float(), kv.v[blocks].flatten(1, 2).float()
    offsets = torch.arange(kv.k.shape[1], device=blocks.device)
    slots = (blocks[..., None] * kv.k.shape[1] + offsets).flatten()
    found = (t.view(len(blocks), -1, *t.shape[1:]) for t in kv_cache_quantisation.read_slots(kv, slots, torch.float32))
    keys, values = found
    return keys, values


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [n, h, d] by angles [n, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
