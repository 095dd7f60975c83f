"""Layer norm with the residual sum: total = x + residual, out = (total - mean) / deviation * weight + bias.

As in the RMS norm, the sum is rounded to the stream's dtype before it is normed, and the norm is float32 with one
rounding at the end. The deviation is computed after the mean is subtracted: a difference of two sums of squares would
lose the digits of a stream far from zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import rms_norm
from trencadis.backends.cuda.kernels.rms_norm import add_residual


@triton.jit(do_not_specialize=["eps"])
def _layer_norm(
    x, residual, weight, bias, total, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = add_residual(x, residual, total, row + at, inside, ADD)
    wide = value.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    scaled = centred * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scaled += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, scaled.to(value.dtype), mask=inside)


def launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, total: Tensor, out: Tensor
) -> None:
    """Writes ``total`` and ``out`` [n, width] from x and residual [n, width], weight and bias [width].

    Without a residual ``total`` is not written.
    """
    rms_norm.check(x, residual, weight)
    assert bias.shape == weight.shape and bias.dtype == x.dtype and bias.is_contiguous()
    n, width = x.shape
    if n:
        block = triton.next_power_of_2(width)
        _layer_norm[(n,)](
            x, x if residual is None else residual, weight, bias, total, out, eps, WIDTH=width, BLOCK=block,
            ADD=residual is not None, num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip
