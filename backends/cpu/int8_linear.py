"""Products of quantised weights by torch's libraries: 8-bit integers, with activations that are rounded to 8 bits. They
are used if the package was built without its own kernels (``native``), which are faster.

Each row of activations is divided by its own largest magnitude and scaled back afterwards, and the sums are of
integers, so that a row has the same bits alone and with other rows.

With VNNI, oneDNN multiplies, in about half of the time that 16-bit floats take. Its results are tested first.
Elsewhere, and for weights with zero points, fbgemm multiplies; without VNNI activations have 7 bits, since sums of two
products of 8 bits overflow 16.

A weight with several scales per row (groups) is rounded again to one scale per row, which adds half a step of 8 bits.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.native import kernel_choice_by_cpu, kernel_library
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import ROW_BYTES

log = logging.getLogger("trencadis.engine")

SMALLEST = 1e-30
"""Scale of a row of weights that are all zero."""

ROUGHEST = 0.0125
"""Maximum error of rounding groups to one scale per row, as a share of the weight's norm; beyond it, in rows of very
different magnitudes, a weight keeps its dtype. 0.009 is usual for normally distributed values.
"""


MIDDLE = 128
"""The unsigned code of 0 in oneDNN's products."""

TILE = 64
"""Number of rows whose activations are rounded at a time."""


@dataclass(slots=True)
class IntegerWeight:
    """A weight of 8 bits in the layout of the library that multiplies it."""

    packed: Any
    bias: Tensor | None
    out_features: int
    in_features: int
    scale: Tensor | None  # float32 [out] for oneDNN; None for fbgemm, which keeps scales in ``packed``
    narrow: bool  # activations have 7 bits

    @property
    def nbytes(self) -> int:
        """Bytes of the integers, and of the scales of each row."""
        return self.out_features * (self.in_features + ROW_BYTES)


def is_available() -> bool:
    """Returns True if torch was built with fbgemm, as on x86 machines."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_narrow_sums() -> bool:
    """Returns True if products of 8 by 8 bits may overflow: without VNNI two of them are added in 16 bits."""
    cpu = torch.cpu
    supported = getattr(cpu, "_is_vnni_supported", getattr(cpu, "_is_avx512_vnni_supported", None))
    return supported is None or not supported()


def integer_weight(q: QTensor, bias: Tensor | None) -> IntegerWeight | None:
    """Packs integers; returns None if the weight must keep the engine's dtype: floats, and rows that 8 bits cannot
    represent.
    """
    if q.data.dtype != torch.int8 or not is_available() or q.shape[1] < 2:
        return None
    if q.scale.shape[1] == 1:
        codes, scale, zero = q.data, q.scale[:, 0], q.zero[:, 0].long() if q.zero is not None else None
    else:
        codes, scale, rough = round_to_int8(q)
        if rough > ROUGHEST:
            log.info(
                "weights: a matrix of %d x %d keeps %s: one scale a row would change it by %.1f %%",
                q.shape[0], q.shape[1], str(q.dtype).removeprefix("torch."), 100 * rough,
            )  # fmt: skip
            return None
        zero = None
    rows, columns = q.shape
    bias = None if bias is None else bias.float()
    whole = not has_narrow_sums() and is_onednn_exact()
    libraries = "oneDNN's (with zero points fbgemm's)" if whole else "fbgemm's"
    kernel_library.log_quantised_kernels(kernel_choice_by_cpu.chosen_table().line(libraries))
    if zero is None and whole:
        packed = torch.ops.onednn.qlinear_prepack(codes.contiguous(), None)
        return IntegerWeight(packed, bias, rows, columns, scale.float().clone(), False)
    zeros = torch.zeros(rows, dtype=torch.int64) if zero is None else zero
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it will move its quantised tensors
        held = torch._make_per_channel_quantized_tensor(codes.contiguous(), scale.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(held, None)
    return IntegerWeight(packed, bias, rows, columns, None, has_narrow_sums())


class Int8Rows(NamedTuple):
    """A weight in int8 with one scale per row."""

    codes: Tensor  # int8 [out, in]
    scale: Tensor  # float32 [out]
    error: float  # norm of the rounding error over the weight's norm


def round_to_int8(q: QTensor, step: int = 1024) -> Int8Rows:
    """Rounds to int8, ``step`` rows at a time."""
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
    return Int8Rows(codes, scales, (wrong / whole) ** 0.5 if whole else 0.0)


def product(x: Tensor, w: IntegerWeight, by_sizes: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
    """Multiplies [n, in] -> [n, out] in ``x``'s dtype; ``by_sizes(rows, multiply)`` limits the numbers of rows for
    oneDNN.

    Special rows need no check: a row of zeros has arbitrary codes and scale 0, a non-finite row a non-finite scale.
    """
    if w.scale is None:
        wide = x.float()
        factor = wide.abs().amax(1, keepdim=True)
        y = _by_fbgemm(wide / factor, w)
    else:
        codes, factor = codes_of(x)
        y = by_sizes(codes, lambda part: _by_onednn(part, w.packed, w.scale))
    y.mul_(factor)
    if w.bias is not None:
        y.add_(w.bias)
    return y.to(x.dtype)


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows to uint8 [n, in] around ``MIDDLE``, with the step of each row, float32 [n, 1]; few at a time, to fit
    the cache.
    """
    if len(x) > TILE:
        made = [codes_of(part) for part in torch.split(x, TILE)]
        return torch.cat([codes for codes, _ in made]), torch.cat([step for _, step in made])
    wide = x.float()
    step = wide.abs().amax(1, keepdim=True).mul_(1 / 127)
    signed = (wide / step).round_().to(torch.int8)
    # Flipping the first bit is faster than a conversion to unsigned.
    return signed.view(torch.uint8).bitwise_xor_(MIDDLE), step


def _by_fbgemm(x: Tensor, w: IntegerWeight) -> Tensor:
    """Multiplies by fbgemm: float32 [n, out] of values between -1 and 1."""
    levels, zero = (63, 64) if w.narrow else (127, 128)
    op = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    y: Tensor = op(x, 1 / levels, zero, w.packed)
    return y


def _by_onednn(codes: Tensor, packed: Any, scale: Tensor | None) -> Tensor:
    """Multiplies codes, uint8 [n, in], by oneDNN: float32 [n, out]."""
    op = torch.ops.onednn.qlinear_pointwise.default
    none: Any = torch.float32, "none", [], ""  # dtype of the output, and no fused operation after it
    y: Tensor = op(codes, 1.0, MIDDLE, packed, scale, _NO_ZEROS, None, 1.0, 0, *none)
    return y


_NO_ZEROS = torch.empty(0, dtype=torch.int32)


@cache
def is_onednn_exact() -> bool:
    """Returns True if oneDNN's product of the largest integers is exact on this machine."""
    try:
        weight = torch.full((16, 64), 127, dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        y = _by_onednn(torch.full((2, 64), 255, dtype=torch.uint8), packed, torch.ones(16))
    except (AttributeError, RuntimeError):
        return False
    return bool((y == 64 * 127 * 127).all())
