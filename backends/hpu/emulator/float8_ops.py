"""Floats of 8 bits as the card has them: casts by a scale and the product, in torch's float8.

A Gaudi 2 reserves the largest exponent of e4m3 for values that are not finite, so that its range ends at 240; a Gaudi 3
reaches 448. A value beyond the range becomes NaN here: whether a release clamps it or not is decided by a closed
library.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Implements ``optional_symbols.mixture_of_fp8_experts``, over all experts; what is between the two products gets a
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
