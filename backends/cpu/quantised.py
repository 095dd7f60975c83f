"""Products of quantised weights on the CPU: integers of 8 bits, by fbgemm's dynamic linear.

That linear finds one range for all rows of its input, so that a token's answer would depend on its company. Here each
row is divided by its largest magnitude and a row that holds 1 and -1 is added: the range is the same for every launch,
and the sums are of integers, so that a row has the same bits alone and in company. Rows are scaled back afterwards.

fbgemm keeps no kernel for a number of rows, unlike oneDNN: rows are not rounded up to ``backends.cpu.ops.SIZES``.

A weight with several scales a row (groups) is rounded again to one scale a row, which adds half a step of 8 bits.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trencadis.core.quant.scheme import ROW_BYTES
from trencadis.core.quant.tensor import QTensor

log = logging.getLogger("trencadis.engine")

SMALLEST = 1e-30
"""What a row of zeros is divided by."""

ROUGHEST = 0.0125
"""Error of rounding groups to one scale a row, as a share of the weight's norm, above which a weight keeps its type:
rows whose magnitudes lie far apart. 0.009 is usual for normal values."""


@dataclass(slots=True)
class IntegerWeight:
    """A weight of 8 bits in fbgemm's layout."""

    packed: Any
    bias: Tensor | None
    out_features: int
    in_features: int
    limits: Tensor  # float32 [1, in]: 1, -1, 0, 0...
    narrow: bool  # activations have 7 bits

    @property
    def nbytes(self) -> int:
        """Bytes of the integers, and of what is kept for each row."""
        return self.out_features * (self.in_features + ROW_BYTES)


def available() -> bool:
    """Whether torch was built with fbgemm, which x86 machines have."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def narrow() -> bool:
    """Whether products of 8 by 8 bits overflow: without VNNI two of them are added in 16 bits."""
    cpu = torch.cpu
    supported = getattr(cpu, "_is_vnni_supported", getattr(cpu, "_is_avx512_vnni_supported", None))
    return supported is None or not supported()


def integer_weight(q: QTensor, bias: Tensor | None) -> IntegerWeight | None:
    """Packs integers; None where the weight has to keep the engine's type: floats, and rows that 8 bits cannot hold."""
    if q.data.dtype != torch.int8 or not available() or q.shape[1] < 2:
        return None
    if q.scale.shape[1] == 1:
        codes, scale, zero = q.data, q.scale[:, 0], q.zero[:, 0].long() if q.zero is not None else None
    else:
        codes, scale, rough = rounded(q)
        if rough > ROUGHEST:
            log.info(
                "weights: a matrix of %d x %d keeps %s: one scale a row would change it by %.1f %%",
                q.shape[0], q.shape[1], str(q.dtype).removeprefix("torch."), 100 * rough,
            )  # fmt: skip
            return None
        zero = None
    rows, columns = q.shape
    zeros = torch.zeros(rows, dtype=torch.int64) if zero is None else zero
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch means to move its quantised tensors elsewhere
        held = torch._make_per_channel_quantized_tensor(codes.contiguous(), scale.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(held, None)
    limits = torch.zeros(1, columns)
    limits[0, 0], limits[0, 1] = 1, -1
    return IntegerWeight(packed, None if bias is None else bias.float(), rows, columns, limits, narrow())


def rounded(q: QTensor, step: int = 1024) -> tuple[Tensor, Tensor, float]:
    """int8 [out, in] and float32 [out]: one scale a row, and the error's share of the weight's norm."""
    rows, columns = q.shape
    codes, scales = torch.empty((rows, columns), dtype=torch.int8), torch.empty(rows)
    wrong = whole = 0.0
    for start in range(0, rows, step):
        values = q.rows(start, start + step).dequantised()
        scale = (values.abs().amax(1, keepdim=True) / 127).clamp_min_(SMALLEST)
        code = (values / scale).round_()
        wrong += float((code * scale - values).square_().sum())
        whole += float(values.square().sum())
        codes[start : start + step] = code.to(torch.int8)
        scales[start : start + step] = scale[:, 0]
    return codes, scales, (wrong / whole) ** 0.5 if whole else 0.0


def product(x: Tensor, w: IntegerWeight) -> Tensor:
    """[n, in] -> [n, out] of ``x``'s type."""
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True).clamp_min_(SMALLEST)
    # A row that is not finite stays so by its scale, and must not widen the range that all rows share.
    scaled = (wide / largest).nan_to_num_(0.0, 0.0, 0.0)
    y: Tensor = torch.ops.quantized.linear_dynamic(torch.cat([scaled, w.limits]), w.packed, w.narrow)
    out = y[: len(x)].mul_(largest)
    if w.bias is not None:
        out.add_(w.bias)
    return out.to(x.dtype)
