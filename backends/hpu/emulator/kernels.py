"""The fused kernels in plain torch. They compute in the given type and round where the real ones may not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from trencadis.backends.hpu.collectives import all_gather, all_reduce
from trencadis.backends.hpu.emulator.device import EmulatedDevice

BLOCKWISE = 0


def sdpa_recomp_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, softmax_mode: str
) -> Tensor:
    """[B, h, S, d] over [B, g, T, d]; a boolean mask is True where a key is seen, another one is added."""
    repeat = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(repeat, dim=1) if repeat > 1 else t for t in (k, v))
    if softmax_mode == "fp32":
        scores = q.float() @ keys.float().transpose(2, 3) * scale
    else:
        scores = q @ keys.transpose(2, 3) * scale
    low = torch.finfo(scores.dtype).min
    if is_causal:
        place = torch.arange(scores.shape[-1], device=q.device)
        scores = scores.masked_fill(place > place[: scores.shape[-2], None], low)
    if mask is not None:
        scores = scores.masked_fill(~mask, low) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).to(q.dtype) @ values


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotary_pos_embedding(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotary over the last dimension, first half against second half."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def all_reduced(x: Tensor) -> Tensor:
    """The sum over the ranks, as a new tensor."""
    return x.clone() if x.is_meta else all_reduce(x.clone())


def all_gathered(x: Tensor, world: int) -> Tensor:
    """[n, width] of every rank side by side."""
    return torch.cat([x] * world, dim=-1) if x.is_meta else all_gather(x, world)


class KernelOps:
    """The fused symbols as operations of torch, which a compiled graph holds as they are."""

    library: Library | None = None

    @classmethod
    def register(cls) -> None:
        """Defines them once a process."""
        if cls.library is not None:
            return
        library: Any = Library("trencadis_emulator", "DEF")  # type: ignore[no-untyped-call]
        cls.library = library
        for schema, function in (
            ("sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? m, bool causal, float scale, str mode) -> Tensor",
             sdpa_recomp_fwd),
            ("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm),
            ("rotary_pos_embedding(Tensor x, Tensor sin, Tensor cos) -> Tensor", rotary_pos_embedding),
            ("all_reduce(Tensor x) -> Tensor", all_reduced),
            ("all_gather(Tensor x, int world) -> Tensor", all_gathered),
        ):  # fmt: skip
            library.define(schema)
            for key in ("CPU", "Meta"):
                library.impl(schema.partition("(")[0], function, key)


class Kernels:
    """The bridge's fused symbols on one emulated device."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        KernelOps.register()

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
    ) -> Tensor:
        """``FusedSDPA.apply``."""
        if valid_seq_len is not None and (not is_causal or attn_mask is not None):
            raise AssertionError("Valid sequence length is supported only with is_causal and without a mask")
        if is_causal and attn_mask is not None:
            raise AssertionError("a mask must contain causality itself")
        factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        if torch.compiler.is_compiling():
            fused = torch.ops.trencadis_emulator.sdpa_recomp_fwd
            return fused(q, k, v, attn_mask, is_causal, factor, softmax_mode.lower())  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(sdpa_recomp_fwd, q, k, v, attn_mask, is_causal, factor, softmax_mode.lower())
        return out

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``FusedRMSNorm.apply``."""
        if x.dim() < 3:
            raise RuntimeError("FusedRMSNorm takes at least 3 dimensions")
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.rms_norm(x, weight, eps)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(rms_norm, x, weight, eps)
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, position_ids: Any, offset: int, mode: Any) -> Tensor:
        """``apply_rotary_pos_emb`` in blockwise mode: inputs of several types are all widened to float32."""
        if position_ids is not None or offset or getattr(mode, "value", mode) != BLOCKWISE:
            raise NotImplementedError("the emulator turns blockwise, without position ids or offset")
        if torch.float32 in (x.dtype, cos.dtype, sin.dtype):
            x, cos, sin = x.float(), cos.float(), sin.float()
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.rotary_pos_embedding(x, sin, cos)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(rotary_pos_embedding, x, sin, cos)
        return out
