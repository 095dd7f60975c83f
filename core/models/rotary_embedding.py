"""Rotary frequencies and tables of decoders and vision towers, and the order of partly rotated heads.

Frequencies are plain, scaled (linear, YaRN, Llama-3, LongRoPE), or M-RoPE's, with an axis number per frequency.
Requests that use LongRoPE's long factors are marked in their positions: those of the first axis are zero. An angle is
the sum of one from the short and one from the long table, and one of the two is zero. So tokens of one launch may use
different tables, and devices need nothing but positions. Partly rotated heads: the values of q and k are reordered as
rotary ops expect them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.rope_config import (
    LinearScaling,
    LongScaling,
    ProportionalScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
)
from trencadis.core.checkpoint.weight_source_interface import StackedPart, StoredRows, WeightSource, stack
from trencadis.core.device.backend import Ops, Rotary
from trencadis.core.quant.quantised_tensor import QTensor, join_weights


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Returns float32 [head_dim / 2]: theta ** (-2i / head_dim)."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def scale_llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Applies Llama-3 scaling to float32 [head_dim / 2].

    Long wavelengths are divided by ``factor``, short ones stay, those in between are blended linearly.
    """
    wavelength = 2 * math.pi / inv_freq
    rotations = scaling.original_max_position / wavelength
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / scaling.factor + keep * inv_freq


def scale_yarn(inv_freq: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Applies YaRN to float32 [head_dim / 2]: like ``scale_llama3``, but blended by index instead of wavelength."""
    half = len(inv_freq)

    def frequency_at(rotations: float) -> float:
        """Returns the (fractional) index of the frequency with that many ``rotations`` within the original length."""
        return half * math.log(scaling.original_max_position / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = frequency_at(scaling.fast), frequency_at(scaling.slow)
    if scaling.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    keep = 1 - ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq / scaling.factor * (1 - keep) + inv_freq * keep


def scale_frequencies(inv_freq: Tensor, theta: float, scaling: Scaling | None) -> Tensor:
    """Returns the frequencies float32 [head_dim / 2] with the checkpoint's scaling."""
    if isinstance(scaling, LinearScaling):
        return inv_freq / scaling.factor
    if isinstance(scaling, YarnScaling):
        return scale_yarn(inv_freq, theta, scaling)
    if isinstance(scaling, ProportionalScaling):
        return torch.cat([inv_freq[: scaling.rotated] / scaling.factor, torch.zeros_like(inv_freq[scaling.rotated :])])
    return scale_llama3(inv_freq, scaling) if isinstance(scaling, RopeScaling) else inv_freq


def long_frequencies(head_dim: int, theta: float, factors: tuple[float, ...]) -> Tensor:
    """Returns LongRoPE's frequencies, float32 [head_dim / 2]: 1 / (factor * theta ** (2i / head_dim))."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)


def text_frequencies(c: TextConfig, long: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (inv_freq float32 [head_dim / 2], axis int64 [head_dim / 2]); angle f is positions[axis[f]] *
    inv_freq[f].

    Models without rotary positions, and values that are not rotated, get angles of zero, which change no bit. ``long``:
    selects LongRoPE's second table.
    """
    c = c.of_layer(c.full_layers[0]) if c.full_layers else c
    rotary_dim, scaling = c.rotary_dim or c.head_dim, c.rope_scaling
    if isinstance(scaling, LongScaling):
        inv_freq = long_frequencies(rotary_dim, c.rope_theta, scaling.long if long else scaling.short)
    else:
        inv_freq = scale_frequencies(inverse_frequencies(rotary_dim, c.rope_theta), c.rope_theta, scaling)
    inv_freq = torch.cat([inv_freq, torch.zeros((c.head_dim - rotary_dim) // 2)])
    if not c.rotary:
        inv_freq = torch.zeros(c.head_dim // 2)
    axis = torch.zeros(c.head_dim // 2, dtype=torch.int64)
    if c.mrope_section is not None and c.interleaved:
        for number, count in enumerate(c.mrope_section[1:], 1):
            axis[number : 3 * count : 3] = number
    elif c.mrope_section is not None:
        held = torch.repeat_interleave(torch.arange(3), torch.tensor(c.mrope_section))
        axis[: len(held)] = held
    return inv_freq, axis


def local_frequencies(c: TextConfig) -> Tensor:
    """Returns float32 [head_dim / 2]: the frequencies of layers with a sliding window, if they have their own table.

    Zeros are those of layers without rotary positions.
    """
    return torch.zeros(c.head_dim // 2) if c.unrotated_layers else inverse_frequencies(c.head_dim, c.local_theta)


class TextRotary:
    """The rotary tables of a decoder."""

    def __init__(self, c: TextConfig, device: torch.device) -> None:
        inv_freq, axis = text_frequencies(c)
        self.inv_freq, self.axis = inv_freq.to(device), axis.to(device)
        self.local = local_frequencies(c).to(device) if c.second_rotary else None
        self.local_axis = self.axis if c.same_heads else torch.zeros(c.head_dim // 2, dtype=torch.int64, device=device)
        self.growth = c.query_growth
        self.long: Tensor | None = None
        self.long_axis: Tensor | None = None
        self.size: Tensor | None = None
        if isinstance(c.rope_scaling, LongScaling):
            self.long, self.long_axis = text_frequencies(c, long=True)[0].to(device), torch.ones_like(self.axis)
            # Only rotated values are scaled: the others keep cos 1 and sin 0.
            half = torch.where(inv_freq > 0, c.rope_scaling.magnitude, 1.0)
            self.size = torch.cat([half, half]).to(device)

    def __call__(self, ops: Ops, positions: Tensor) -> Rotary:
        """Returns the rotary factors of int32 positions [3, n]."""
        if self.long is not None:
            return self._of_both(ops, positions)
        found = ops.rotary(positions, self.inv_freq, self.axis)
        if self.growth is None:
            return found
        beta, length = self.growth
        return found._replace(query_scale=1 + beta * torch.log1p((positions[0] // length).float()))

    def _of_both(self, ops: Ops, positions: Tensor) -> Rotary:
        """Returns the factors if requests use one of two tables."""
        assert self.long is not None and self.long_axis is not None and self.size is not None
        apart = torch.stack([positions[0], positions[1] - positions[0]])
        short, long = ops.rotary(apart, self.inv_freq, self.axis), ops.rotary(apart, self.long, self.long_axis)
        return Rotary(short.cos * long.cos * self.size, (short.sin + long.sin) * self.size)

    def of_windows(self, ops: Ops, positions: Tensor) -> Rotary | None:
        """Returns the factors for layers with a table of their own; None if all share the decoder's table."""
        return None if self.local is None else ops.rotary(positions, self.local, self.local_axis)

    def nbytes(self) -> int:
        """Bytes of all tables."""
        tables = (self.inv_freq, self.axis, self.local, self.long, self.long_axis, self.size)
        own = 0 if self.local_axis is self.axis else self.local_axis.nbytes
        return own + sum(t.nbytes for t in tables if t is not None)


def vision_frequencies(head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns (inv_freq, axis) like ``text_frequencies``, for positions (row, column).

    One half of a head is rotated by the row, the other by the column.
    """
    inv_freq = inverse_frequencies(head_dim // 2, theta)
    return inv_freq.repeat(2), torch.arange(2).repeat_interleave(head_dim // 4)


class HeadSpan(NamedTuple):
    """Values [start, stop) of a head."""

    start: int
    stop: int


ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")


def rotated_spans(head_dim: int, rotary_dim: int, adjacent: bool) -> tuple[HeadSpan, ...]:
    """Returns the spans of a head's stored values in the order that rotary ops expect; ``adjacent``: as in
    ``PartialRotarySource``.
    """
    middle, half = rotary_dim + (head_dim - rotary_dim) // 2, rotary_dim // 2
    first, second = [HeadSpan(0, half)], [HeadSpan(half, rotary_dim)]
    if adjacent:
        first, second = ([HeadSpan(i, i + 1) for i in range(start, rotary_dim, 2)] for start in range(2))
    return (*first, HeadSpan(rotary_dim, middle), *second, HeadSpan(middle, head_dim))


def gate_spans(head_dim: int, gated: bool) -> tuple[HeadSpan, ...]:
    """Returns the span of the gate that follows a query head and is as wide; none if there is no gate."""
    return (HeadSpan(head_dim, 2 * head_dim),) if gated else ()


def reorder_heads(rows: Tensor, head_dim: int, spans: Sequence[HeadSpan]) -> Tensor:
    """Returns rows [whole heads, ...] with the ``spans`` of each head, one after the other."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    return torch.cat([heads[:, a:b] for a, b in spans], 1).reshape(rows.shape)


class PartialRotarySource:
    """Wraps a source and moves the rotated values of a head, stored at its start, to the start of each half.

    Rotary ops rotate the first half of a head against the second. Scores are sums over a head's values, so that any
    order is valid if q and k share it, and the weights of their norms as well.

    Args:
        rotary_dim: number of rotated values of a head.
        adjacent: True if the two values of a rotated pair are stored next to each other.
        gated: True if each query head is followed by its output gate, which stays in the order of v.
    """

    def __init__(
        self, source: WeightSource, head_dim: int, rotary_dim: int, adjacent: bool = False, gated: bool = False
    ) -> None:
        self.source = source
        self.spans = rotated_spans(head_dim, rotary_dim, adjacent)
        self.gate = gate_spans(head_dim, gated)

    def _reorder(self, name: str, part: Tensor) -> Tensor:
        module = name.rpartition(".")[0].rpartition(".")[2]
        if module not in ROTATED:
            return part
        spans = self._spans(module)
        return reorder_heads(part, spans[-1].stop, spans)

    def _spans(self, module: str) -> tuple[HeadSpan, ...]:
        """Returns the order in which the rows of a head are taken, and of its gate if it has one."""
        return (*self.spans, *self.gate) if module == "q_proj" else self.spans

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._reorder(name, self.source.take(name, shape))

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        return self._reorder(name, self.source.shard(name, shape, dim, start, stop))

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def stored(self, parts: Sequence[StackedPart], inputs: int, start: int, stop: int) -> StoredRows | None:
        give = getattr(self.source, "stored", None)
        rotates = any(part.name.rpartition(".")[0].rpartition(".")[2] in ROTATED for part in parts)
        found: StoredRows | None = None if rotates or give is None else give(parts, inputs, start, stop)
        return found

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        found = self.source.take_quantised(name, shape, dim, start, stop, own)
        module = name.rpartition(".")[2]
        if found is None or module not in ROTATED:
            return found
        spans = self._spans(module)
        heads = range(0, stop - start, spans[-1].stop)
        return join_weights([found.rows(head + a, head + b) for head in heads for a, b in spans])

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def kv_scale(self, name: str, kind: str) -> float:
        return self.source.kv_scale(name, kind)
