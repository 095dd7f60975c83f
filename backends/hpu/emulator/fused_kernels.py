"""The fused kernels in plain torch. They compute in the given type and round where the real ones may not.

8-bit floats are torch's float8, with casts by a scale. A Gaudi 2 reserves the largest exponent of e4m3 for values that
are not finite, so that its range ends at 240; a Gaudi 3 reaches 448. A value beyond the range becomes NaN here: whether
a release clamps it or not is decided by a closed library.
"""

from __future__ import annotations

import faulthandler
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from trencadis.backends.hpu.collectives import all_gather, all_reduce
from trencadis.backends.hpu.emulator import emulated_errors
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.habana_bridge import AttentionPart

E4M3 = torch.float8_e4m3fn
WIDE = (torch.float32, torch.bfloat16)
"""Dtypes that casts accept and return."""

BEYOND = 464.0
"""Half a step above the largest e4m3, 448: larger values do not round to a code."""

NAN = 0x7F
"""The code of values that are not finite."""


def cast_to_fp8_v2(x: Tensor, scale: Tensor | None, limit: float) -> Tensor:
    """Returns e4m3 codes of x [..., k] times ``scale``, which broadcasts to it; NaN beyond ``limit``."""
    if x.dtype not in WIDE:
        raise RuntimeError(f"cast_to_fp8_v2 takes float32 and bfloat16, not {x.dtype}")
    if scale is not None and not can_broadcast(scale, tuple(x.shape)):
        raise RuntimeError(f"cast_to_fp8_v2: a scale of shape {list(scale.shape)} does not fit {list(x.shape)}")
    wide = x.float() if scale is None else x.float() * scale.float()
    codes = wide.to(E4M3)
    if x.is_meta:
        return codes
    # torch's own cast may end at 448 where the value rounds beyond it.
    beyond = ~((codes.float().abs() <= limit) & (wide.abs() <= BEYOND))
    bits = codes.view(torch.uint8)
    return torch.where(beyond, torch.full_like(bits, NAN), bits).view(E4M3)


def cast_from_fp8(x: Tensor, dtype: torch.dtype, scale: Tensor | None, limit: float) -> Tensor:
    """Returns the values of e4m3 codes times ``scale``, in ``dtype``."""
    if x.dtype != E4M3:
        raise RuntimeError(f"cast_from_fp8 takes 8-bit floats, not {x.dtype}")
    if dtype not in WIDE:
        raise RuntimeError(f"cast_from_fp8 gives float32 and bfloat16, not {dtype}")
    values = _values(x, limit)
    return (values if scale is None else values * scale.float()).to(dtype)


def fp8_gemm_v2(
    a: Tensor, b: Tensor, dtype: torch.dtype, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, limit: float
) -> Tensor:
    """Multiplies [n, k] x [m, k] -> [n, m] in bfloat16 or float32; scales broadcast to a and to b transposed."""
    if a.dtype != E4M3 or b.dtype != E4M3:
        raise RuntimeError(f"fp8_gemm_v2 multiplies 8-bit floats, not {a.dtype} by {b.dtype}")
    if dtype not in WIDE:
        raise RuntimeError(f"fp8_gemm_v2 gives bfloat16 or float32, not {dtype}")
    transposed = (b.shape[1], b.shape[0])
    for name, scale, shape in (("A", a_scale, tuple(a.shape)), ("B", b_scale, transposed)):
        if not can_broadcast(scale, shape):
            raise RuntimeError(f"fp8_gemm_v2: scale {name} of shape {list(scale.shape)} does not fit {list(shape)}")
    y = (_values(a, limit) * a_scale.float()) @ (_values(b, limit).t() * b_scale.float())
    return (y if bias is None else y + bias.float()).to(dtype)


def mixture_of_fp8_experts(
    x: Tensor, scale: Tensor, chosen: Tensor, shares: Tensor, gate_up: list[Tensor], down: list[Tensor],
    gate_up_scale: list[Tensor], down_scale: list[Tensor], limit: float,
) -> Tensor:  # fmt: skip
    """Implements ``bridge_loader.mixture_of_fp8_experts``, over all experts; what is between the two products gets a
    scale for each token.
    """
    if chosen.dtype not in (torch.int32, torch.int64) or shares.dtype not in WIDE:
        raise RuntimeError("mixture_of_experts takes a table of integers, and shares of bfloat16 or float32")
    if scale.numel() not in (1, len(x)):
        raise RuntimeError(f"mixture_of_experts: {scale.numel()} scales for {len(x)} tokens")
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i, (first, second, own, other) in enumerate(zip(gate_up, down, gate_up_scale, down_scale, strict=True)):
        share = torch.where(chosen == i, shares.float(), 0.0).sum(-1, keepdim=True)
        gate, up = fp8_gemm_v2(x, first, torch.float32, scale.reshape(-1, 1), own, None, limit).chunk(2, dim=-1)
        made = torch.nn.functional.silu(gate) * up
        between = made.abs().amax(-1, keepdim=True).clamp_min(1e-30) / limit
        codes = cast_to_fp8_v2(made, 1.0 / between, limit)
        y = fp8_gemm_v2(codes, second, torch.float32, between, other, None, limit)
        out = out + torch.where(share > 0, y * share, 0.0)
    return out.to(shares.dtype)


def can_broadcast(scale: Tensor, shape: tuple[int, ...]) -> bool:
    """Returns True if ``scale`` broadcasts to ``shape``."""
    own = tuple(scale.shape)
    return len(own) <= len(shape) and all(n in (1, size) for n, size in zip(own[::-1], shape[::-1], strict=False))


def _values(codes: Tensor, limit: float) -> Tensor:
    """Returns the values of codes in float32; codes beyond the card's range become NaN."""
    wide = codes.float()
    return wide if codes.is_meta else torch.where(wide.abs() <= limit, wide, float("nan"))


SCHEMAS = (
    ("cast_to_fp8_v2(Tensor x, Tensor? scale, float limit) -> Tensor", cast_to_fp8_v2),
    ("cast_from_fp8(Tensor x, ScalarType dtype, Tensor? scale, float limit) -> Tensor", cast_from_fp8),
    ("fp8_gemm_v2(Tensor a, Tensor b, ScalarType dtype, Tensor a_scale, Tensor b_scale, Tensor? bias, float limit) -> "
     "Tensor", fp8_gemm_v2),
)  # fmt: skip
"""The casts as torch operations, which a compiled graph keeps unsplit."""


BLOCKWISE = 0
CAUSAL_STEP = 1024
MASK_BYTES, MASK_ITEM = (1 << 31) - 1, 2
"""Bytes of the largest mask of a head, and bytes of one of its values, booleans widened to bfloat16."""


def softmax_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float, softmax_mode: str
) -> Tensor:
    """Returns scores [B, h, S, T], float32 in mode fp32. Hidden scores are -inf, so that a fully hidden row becomes
    NaN.
    """
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if q.shape[1] > k.shape[1] else k
    if softmax_mode == "fp32":
        scores = q.float() @ keys.float().transpose(2, 3) * scale
    else:
        scores = q @ keys.transpose(2, 3) * scale
    if is_causal:
        position = torch.arange(scores.shape[-1], device=q.device)
        scores = scores.masked_fill(position > position[: scores.shape[-2], None], -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def sdpa_recomp_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, softmax_mode: str
) -> Tensor:
    """Computes attention [B, h, S, d] over [B, g, T, d]; a boolean mask is True for visible keys, another dtype is
    added.
    """
    scores = softmax_scores(q, k, mask, is_causal, scale, softmax_mode)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1) if q.shape[1] > v.shape[1] else v
    return scores.softmax(-1).to(q.dtype) @ values


def sdpa_recomp_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, softmax_mode: str
) -> AttentionPart:
    """Returns ``sdpa_recomp_fwd``, each row's maximum in the inputs' type, and the inverse of its sum of exponentials.

    The inverse belongs to the maximum as it is rounded. It is float32, except for bfloat16 in mode fast.
    """
    scores = softmax_scores(q, k, mask, is_causal, scale, softmax_mode)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1) if q.shape[1] > v.shape[1] else v
    high = scores.amax(-1, keepdim=True).to(q.dtype)
    share = (scores.float() - high.float()).exp()
    inverse = share.sum(-1, keepdim=True).reciprocal()
    narrow = softmax_mode == "fast" and q.dtype == torch.bfloat16
    out = (share * inverse).to(q.dtype) @ values
    return AttentionPart(out, high, inverse.to(q.dtype) if narrow else inverse)


def block_softmax_adjustment(high: Tensor, total: Tensor, groups: Tensor, rows: int, shape: list[int]) -> Tensor:
    """Returns exp(high - M) / sum over the row's blocks of exp(high - M) * total, of ``shape``; group -1 owns unlisted
    blocks.

    The sum is at least the block's own share, so that an unlisted block does not divide by zero.
    """
    blocks = len(high)
    flat, sums = high.reshape(blocks, -1), total.reshape(blocks, -1)
    owner = torch.where(groups < 0, rows, groups).long()
    best = torch.full((rows + 1, flat.shape[1]), -math.inf, dtype=flat.dtype, device=flat.device)
    best = best.index_reduce(0, owner, flat, "amax")
    factor = (flat - best.index_select(0, owner)).exp()
    below = torch.zeros_like(best).index_add(0, owner, factor * sums)
    below[rows] = 0
    return (factor / torch.maximum(below.index_select(0, owner), factor * sums)).view(shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes x / rms(x) * weight over the last dimension, in float32 inside."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotary_pos_embedding(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Applies rotary embedding over the last dimension, first half against second half."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def check_summable(x: Tensor) -> None:
    """Raises RuntimeError for dtypes that HCCL cannot add; the plug-in would convert to float32 or abort."""
    if x.dtype not in WIDE:
        raise RuntimeError(f"HCCL supports only float or bfloat16 reduction, not {x.dtype}")


def all_reduced(x: Tensor) -> Tensor:
    """Returns the sum over the ranks, as a new tensor."""
    check_summable(x)
    return x.clone() if x.is_meta else all_reduce(x.clone())


def all_gathered(x: Tensor, world: int) -> Tensor:
    """Gathers [n, width] of every rank side by side."""
    return torch.cat([x] * world, dim=-1) if x.is_meta else all_gather(x, world)


def mixture_of_experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: list[Tensor], down: list[Tensor]) -> Tensor:
    """Implements ``bridge_loader.mixture_of_experts``, over all experts: values of those not chosen are left out."""
    if chosen.dtype not in (torch.int32, torch.int64) or x.dtype == torch.float16:
        raise RuntimeError("mixture_of_experts takes a table of integers, and bfloat16 or float32")
    out = torch.zeros_like(x, dtype=torch.float32)
    for i, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        share = torch.where(chosen == i, shares.float(), 0.0).sum(-1, keepdim=True)
        gate, up = (x @ first.t()).chunk(2, dim=-1)
        made = (torch.nn.functional.silu(gate) * up) @ second.t()
        out = out + torch.where(share > 0, made.float() * share, 0.0)
    return out.to(x.dtype)


def convert_from_uint4(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """Implements ``bridge_loader.convert_from_uint4``, into bfloat16 only, the dtype that callers use."""
    if codes.dtype != torch.int32 or zero.dtype not in (torch.int32, scale.dtype):
        raise RuntimeError("Only int input tensors are supported")
    if dtype != torch.bfloat16:
        raise RuntimeError(f"convert_from_uint4 gives bfloat16, not {dtype}")
    rows, columns, groups = codes.shape[0], codes.shape[1] * 8, scale.shape[0]
    if scale.shape[1] != columns or rows % groups or zero.shape != (groups, codes.shape[1]):
        raise RuntimeError(
            f"convert_from_uint4: scale {list(scale.shape)} and zero_point {list(zero.shape)} do not divide "
            f"{[rows, columns]}"
        )
    each = rows // groups
    difference = _nibbles(codes).float() - _nibbles(zero).float().repeat_interleave(each, 0)
    return (difference * scale.float().repeat_interleave(each, 0)).to(dtype)


def _nibbles(words: Tensor) -> Tensor:
    """Unpacks int32 [n, m] -> [n, 8 m], lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).reshape(words.shape[0], -1)


class KernelOps:
    """The fused symbols as torch operations, which a compiled graph keeps unsplit."""

    library: Library | None = None

    @classmethod
    def register(cls) -> None:
        """Registers the operations, once per process."""
        if cls.library is not None:
            return
        library: Any = Library("trencadis_emulator", "DEF")  # type: ignore[no-untyped-call]
        cls.library = library
        for schema, function in (
            ("sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? m, bool causal, float scale, str mode) -> Tensor",
             sdpa_recomp_fwd),
            ("sdpa_recomp_fwd.parts(Tensor q, Tensor k, Tensor v, Tensor? m, bool causal, float scale, str mode) -> "
             "(Tensor, Tensor, Tensor)", sdpa_recomp_parts),
            ("block_softmax_adjustment(Tensor high, Tensor total, Tensor groups, int rows, int[] shape) -> Tensor",
             block_softmax_adjustment),
            ("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm),
            ("rotary_pos_embedding(Tensor x, Tensor sin, Tensor cos) -> Tensor", rotary_pos_embedding),
            ("all_reduce(Tensor x) -> Tensor", all_reduced),
            ("all_gather(Tensor x, int world) -> Tensor", all_gathered),
            ("mixture_of_experts(Tensor x, Tensor chosen, Tensor shares, Tensor[] gate_up, Tensor[] down) -> Tensor",
             mixture_of_experts),
            ("mixture_of_experts.fp8(Tensor x, Tensor scale, Tensor chosen, Tensor shares, Tensor[] gate_up, Tensor[] "
             "down, Tensor[] gate_up_scale, Tensor[] down_scale, float limit) -> Tensor",
             mixture_of_fp8_experts),
            ("convert_from_uint4(Tensor codes, Tensor scale, Tensor zero, ScalarType dtype) -> Tensor",
             convert_from_uint4),
            *SCHEMAS,
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
        """Implements ``FusedSDPA.apply``: without ``recompute_mode`` it asks a builtin, which Dynamo cannot trace."""
        if recompute_mode is None:
            faulthandler.is_enabled()
        if valid_seq_len is not None and (not is_causal or attn_mask is not None):
            raise AssertionError("Valid sequence length is supported only with is_causal and without a mask")
        self._check(q, k, v, attn_mask, is_causal, softmax_mode.lower())
        factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        if torch.compiler.is_compiling():
            fused = torch.ops.trencadis_emulator.sdpa_recomp_fwd.default
            return fused(q, k, v, attn_mask, is_causal, factor, softmax_mode.lower())  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(sdpa_recomp_fwd, q, k, v, attn_mask, is_causal, factor, softmax_mode.lower())
        return out

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, mode: str) -> None:
        """Checks the limits of the kernel, beyond some of which a card returns NaN instead of an error."""
        if mode == "fp32" and not q.dtype == k.dtype == v.dtype == torch.bfloat16:
            raise AssertionError("softmax_mode fp32 takes bfloat16 alone")
        if is_causal and mask is not None:
            raise AssertionError("a mask must contain causality itself")
        if q.dim() != 4 or k.dim() != 4 or q.shape[1] % k.shape[1]:
            raise AssertionError("the kernel takes [B, H, S, D] and whole groups of heads")
        if mask is not None and mask.dim() != 4:
            raise ValueError(f"the kernel takes a mask of 4 dimensions, not {mask.dim()}")
        if mask is not None and mask.shape[-2] * mask.shape[-1] * MASK_ITEM > MASK_BYTES:
            raise emulated_errors.mask_too_large("FusedSDPA", mask.shape[-2] * mask.shape[-1] * MASK_ITEM)

    def parts(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, softmax_mode: str
    ) -> AttentionPart:
        """Implements ``bridge_loader.sdpa_parts``: statistics of a causal call are correct only for multiples of
        1024.
        """
        self._check(q, k, v, mask, is_causal, softmax_mode.lower())
        if is_causal and (q.shape[2] % CAUSAL_STEP or k.shape[2] % CAUSAL_STEP):
            raise emulated_errors.causal_statistics(q.shape[2], k.shape[2], CAUSAL_STEP)
        if torch.compiler.is_compiling():
            parts = torch.ops.trencadis_emulator.sdpa_recomp_fwd.parts
            return AttentionPart(*parts(q, k, v, mask, is_causal, scale, softmax_mode.lower()))
        out: AttentionPart = self.device.kernel(
            sdpa_recomp_parts, q, k, v, mask, is_causal, scale, softmax_mode.lower()
        )
        return out

    def adjustment(self, high: Tensor, total: Tensor, groups: Tensor, rows: int, shape: list[int]) -> Tensor:
        """Implements ``torch.ops.hpu.block_softmax_adjustment``."""
        if high.shape != total.shape or high.dtype != total.dtype or high.dtype == torch.float16:
            raise AssertionError("maxima and sums are alike, in float32 or bfloat16")
        if torch.compiler.is_compiling():
            joined = torch.ops.trencadis_emulator.block_softmax_adjustment
            return joined(high, total, groups, rows, shape)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(block_softmax_adjustment, high, total, groups, rows, shape)
        return out

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Implements ``FusedRMSNorm.apply``."""
        if x.dim() < 3:
            raise RuntimeError("FusedRMSNorm takes at least 3 dimensions")
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.rms_norm(x, weight, eps)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(rms_norm, x, weight, eps)
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, position_ids: Any, offset: int, mode: Any) -> Tensor:
        """Implements ``apply_rotary_pos_emb`` in blockwise mode: inputs of several types are all widened to float32."""
        if position_ids is not None or offset or getattr(mode, "value", mode) != BLOCKWISE:
            raise NotImplementedError("the emulator rotates blockwise, without position ids or offset")
        if torch.float32 in (x.dtype, cos.dtype, sin.dtype):
            x, cos, sin = x.float(), cos.float(), sin.float()
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.rotary_pos_embedding(x, sin, cos)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(rotary_pos_embedding, x, sin, cos)
        return out

    def to_fp8(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Implements ``torch.ops.hpu.cast_to_fp8_v2``; returns its first result."""
        limit = self.device.profile.fp8_top
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.cast_to_fp8_v2(x, scale, limit)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(cast_to_fp8_v2, x, scale, limit)
        return out

    def from_fp8(self, x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Implements ``torch.ops.hpu.cast_from_fp8``."""
        limit = self.device.profile.fp8_top
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.cast_from_fp8(x, dtype, scale, limit)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(cast_from_fp8, x, dtype, scale, limit)
        return out

    def fp8_gemm(
        self, a: Tensor, b: Tensor, dtype: torch.dtype, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Implements ``torch.ops.hpu.fp8_gemm_v2`` with its second matrix transposed."""
        args = a, b, dtype, a_scale, b_scale, bias, self.device.profile.fp8_top
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.fp8_gemm_v2(*args)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(fp8_gemm_v2, *args)
        return out

    def experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
    ) -> Tensor:
        """Implements ``torch.ops.hpu.mixture_of_experts``."""
        args = x, chosen, shares, list(gate_up), list(down)
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.mixture_of_experts(*args)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(mixture_of_experts, *args)
        return out

    def fp8_experts(
        self, x: Tensor, scale: Tensor, chosen: Tensor, shares: Tensor, gate_up: Sequence[Tensor],
        down: Sequence[Tensor], gate_up_scale: Sequence[Tensor], down_scale: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """Implements ``torch.ops.hpu.mixture_of_experts`` for 8-bit floats."""
        weights = list(gate_up), list(down), list(gate_up_scale), list(down_scale)
        args = x, scale, chosen, shares, *weights, self.device.profile.fp8_top
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.mixture_of_experts.fp8(*args)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(mixture_of_fp8_experts, *args)
        return out

    def from_uint4(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """Implements ``torch.ops.hpu.convert_from_uint4``."""
        if torch.compiler.is_compiling():
            return torch.ops.trencadis_emulator.convert_from_uint4(codes, scale, zero, dtype)  # type: ignore[no-any-return]
        out: Tensor = self.device.kernel(convert_from_uint4, codes, scale, zero, dtype)
        return out
