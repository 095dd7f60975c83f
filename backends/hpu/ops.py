"""The ops on Gaudi: the reference's where they are good enough, fused symbols and rectangles where they are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import trencadis.backends.hpu.attention as attention
from trencadis.backends.cpu.reference import ReferenceOps
from trencadis.backends.cpu.sampling import sample_full
from trencadis.backends.hpu.attention import BlockDecodeAttn, ContextAttn, FreshAttn
from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.launches.regions import Regions
from trencadis.backends.hpu.settings import HpuSettings
from trencadis.core.backend import Attn, HeadTensors, HeadTensorsOut, LayerKV, Rotary, SamplerState, Segments

T = TypeVar("T")

FUSED_ROWS = 3
"""Dimensions that FusedRMSNorm takes at least."""


class Drawn(NamedTuple):
    """What a compiled SAMPLE leaves where the counts are stored by a graph of their own."""

    out: HeadTensorsOut
    rows: Tensor  # int32 [r, V] counts of each row, the id drawn now among them
    slot: Tensor  # int64 [r]
    counts: Tensor  # int32 [slots + 1, V]


class HpuOps(ReferenceOps):
    """``core.backend.Ops`` over a bridge."""

    def __init__(self, bridge: Bridge, settings: HpuSettings, block_size: int) -> None:
        self.bridge, self.settings, self.block_size = bridge, settings, block_size
        self.sdpa = bridge.fused_sdpa if settings.fused_sdpa else None
        self.lazy = bridge.is_lazy()
        self.regions = (
            None
            if self.lazy or not settings.regional
            else Regions(partial(bridge.compile, fullgraph=settings.fullgraph))
        )
        self._layers, self._inside = 0, False

    def begin(self) -> None:
        """A launch starts: its layers are counted from here, so that its cuts never move."""
        self._layers = 0

    def layer(self, run: Callable[..., T], *args: Any) -> T:
        """In compile mode a region that every layer of its kind, and every bucket of its shape, shares."""
        if not self.lazy:
            return self.region(run, *args)
        out: T = self.bridge.layer(run, *args)
        return out

    def region(self, run: Callable[..., T], *args: Any) -> T:
        if self.regions is None:
            return run(*args)
        self._inside = True
        try:
            out: Any = self.regions(run, *args)
        finally:
            self._inside = False
        if isinstance(out, Drawn):
            self.regions(self.scatter_rows, out.counts, out.slot, out.rows)
            out = out.out
        found: T = out
        return found

    def first_residual(self, x: Tensor) -> Tensor | None:
        """Compiled, the first layer has to look like the others: None would be a second trace of every shape."""
        return None if self.lazy else torch.zeros_like(x)

    def embed(
        self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
    ) -> Tensor:
        """Rows by ``index_select``: the bridge's compiler leaves ``index`` out of its graphs."""
        ids = torch.where(from_slot > 0, last.index_select(0, from_slot), tokens)
        own, image = table.index_select(0, ids), arena.index_select(0, image_row)
        return torch.where((image_row > 0)[:, None], image, own)

    def patches(self, pixels: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
        """Without ``addcmul``, which the bridge's compiler leaves out of its graphs."""
        return (pixels.float() * scale + shift).to(dtype)

    def sample(self, logits: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> HeadTensorsOut:
        """Counts are read before they are stored. In one compiled graph that would write those of every slot anew."""
        if not (full and self._inside):
            return super().sample(logits, head, state, full)
        kept: list[Tensor] = []

        def note(token: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> None:
            self.update(token, head, state, False)
            kept.append(counted(token, head, state))

        out: Any = Drawn(sample_full(logits, head, state, self.thresholds, note), kept[0], head.slot, state.counts)
        found: HeadTensorsOut = out
        return found

    def update(self, token: Tensor, head: HeadTensors, state: SamplerState, full: bool) -> None:
        """Whole rows of counts are stored, since an ``index_put_`` would write the counts of every slot anew."""
        state.last.index_copy_(0, head.slot, token.int())
        if full:
            state.counts.index_copy_(0, head.slot, counted(token, head, state))

    def cut(self, kind: str) -> None:
        """The one place of ``mark_step``, which does nothing in compile mode."""
        if not self.lazy:
            return
        if kind == "layer":
            self._layers += 1
            if not self.settings.cuts or self._layers % self.settings.cut_layers:
                return
        self.bridge.mark_step()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        fused = self.bridge.fused_rms_norm
        if fused is None:
            return super().rms_norm(x, weight, eps, residual)
        total = x if residual is None else x + residual
        return fused(total[None] if total.dim() < FUSED_ROWS else total, weight, eps).view(total.shape), total

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn) -> Tensor:
        """Keys and values go to slots of the flat base tensors.

        A view of them could not be captured. Compiled, ``index_copy_`` on a graph's input is the one store that the
        bridge puts back in place; any other writes the whole cache anew.
        """
        assert isinstance(attn, (FreshAttn, ContextAttn, BlockDecodeAttn))
        cos, sin = rotary.cos.to(q.dtype), rotary.sin.to(q.dtype)
        kv.k.index_copy_(0, attn.slot, self._turn(k, cos, sin))
        kv.v.index_copy_(0, attn.slot, v)
        return self._turn(q, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn = self.bridge.apply_rotary
        if turn is not None:
            return turn(x, cos[:, None], sin[:, None])
        return attention.rotate(x, cos[:, None], sin[:, None])

    def attend(self, q: Tensor, kv: LayerKV, attn: Attn, scale: float) -> Tensor:
        fp32 = self.settings.fp32_softmax
        if isinstance(attn, FreshAttn):  # no match statement: not every Dynamo since torch 2.6 can trace its classes
            return attention.attend_fresh(q, kv, attn, scale, fp32, self.sdpa)
        if isinstance(attn, ContextAttn):
            return attention.attend_context(q, kv, attn, self.block_size, scale, fp32, self.sdpa)
        if isinstance(attn, BlockDecodeAttn):
            return attention.attend_decode(q, kv, attn, self.block_size, scale, fp32)
        raise TypeError(f"{type(attn).__name__} was not filled by this backend")

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Turned in float32, as the reference."""
        cos, sin = rotary
        return self._turn(q.float(), cos, sin).to(q.dtype), self._turn(k.float(), cos, sin).to(k.dtype)

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        return attention.attend_windows(q, k, v, seg, scale, self.settings.fp32_softmax_vision)

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        fp32 = self.settings.fp32_softmax_vision
        return attention.attend_images(q, k, v, seg, scale, fp32, self.sdpa, lambda: self.cut("tile"))


def counted(token: Tensor, head: HeadTensors, state: SamplerState) -> Tensor:
    """int32 [r, V]: the counts of each row's slot, with the ids drawn now."""
    counts = state.counts.index_select(0, head.slot)
    vocab = torch.arange(counts.shape[1], device=token.device, dtype=torch.int32)
    return counts + (vocab == token.int()[:, None])
