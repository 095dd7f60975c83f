"""The ops on Gaudi: the reference's where they are good enough, fused symbols and rectangles where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from trencadis.backends.cpu.reference import ReferenceOps
from trencadis.backends.hpu.attention import context, decode, fresh, vision
from trencadis.backends.hpu.attention.softmax import AttentionKernels
from trencadis.backends.hpu.attention.tensors import (
    BlockDecodeAttn,
    ContextAttn,
    FreshAttn,
    JoinedContext,
    MaskedSegments,
    SharedDecode,
    SlicedContext,
)
from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.settings import HpuSettings
from trencadis.core.backend import Attn, LayerKV, Rotary, Segments

T = TypeVar("T")

PREPARE = "prepare_attn and prepare_segments make what attention takes, once a launch"

FUSED_ROWS = 3
"""Dimensions that FusedRMSNorm takes at least."""


class HpuOps(ReferenceOps):
    """``core.backend.Ops`` over a bridge."""

    def __init__(self, bridge: Bridge, settings: HpuSettings, block_size: int) -> None:
        self.bridge, self.settings, self.block_size = bridge, settings, block_size
        fused = settings.fused_sdpa
        self.kernels = AttentionKernels(
            bridge.fused_sdpa if fused else None,
            bridge.sdpa_parts if fused else None,
            bridge.product,
            bridge.block_adjustment if settings.block_adjustment else None,
        )
        self._layers = 0

    def begin(self) -> None:
        """A launch starts: its layers are counted from here, so that its cuts never move."""
        self._layers = 0

    def layer(self, run: Callable[..., T], *args: Any) -> T:
        out: T = self.bridge.layer(run, *args)
        return out

    def cut(self, kind: str) -> None:
        """The one place of ``mark_step``."""
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

    def prepare_attn(self, attn: Attn, heads: int, kv: LayerKV) -> Any:
        """Masks, owners and the like, which would be the same in every layer."""
        match attn:
            case BlockDecodeAttn():
                return decode.prepare_decode(attn, heads, kv, self.block_size, self.settings.fp32_softmax)
            case ContextAttn():
                return context.prepare_context(attn, self.block_size, self.settings.context_slice)
        return attn

    def prepare_segments(self, seg: Segments) -> Any:
        return vision.prepare_segments(seg)

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values go to slots of the flat base tensors.

        A view of them could not be captured. Compiled, ``index_copy_`` on a graph's input is the one store that the
        bridge puts back in place; any other writes the whole cache anew.
        """
        assert isinstance(attn, FreshAttn | JoinedContext | SlicedContext | SharedDecode), PREPARE
        cos, sin = rotary.cos[:, None], rotary.sin[:, None]
        turned = self._turn(k, cos, sin)
        kv.k.index_copy_(0, attn.slot, turned)
        kv.v.index_copy_(0, attn.slot, v)
        return self._turn(q, cos, sin), turned, v

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turned in float32: in bfloat16 the factors of far positions would be those of their neighbours."""
        turn = self.bridge.apply_rotary
        return (turn(x, cos, sin) if turn is not None else rotate(x, cos, sin)).to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float) -> Tensor:
        fp32, kernels, size = self.settings.fp32_softmax, self.kernels, self.block_size
        match attn:
            case FreshAttn():
                return fresh.attend_fresh(q, k, v, attn, scale, fp32, kernels)
            case JoinedContext() | SlicedContext():
                return context.attend_context(q, k, v, kv, attn, size, scale, fp32, kernels)
            case SharedDecode():
                return decode.attend_decode(q, kv, attn, size, scale, fp32, kernels)
        raise TypeError(f"{type(attn).__name__}: {PREPARE}")

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        cos, sin = rotary.cos[:, None], rotary.sin[:, None]
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        assert isinstance(seg, MaskedSegments), PREPARE
        return vision.attend_windows(q, k, v, seg, scale, self.settings.fp32_softmax_vision, self.kernels)

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        assert isinstance(seg, MaskedSegments), PREPARE
        fp32 = self.settings.fp32_softmax_vision
        return vision.attend_images(q, k, v, seg, scale, fp32, self.kernels, lambda: self.cut("tile"))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary where the plug-in has no kernel for it: the first half of the head against the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
