"""Operators of the twin that graphs record as one call, and the one of quantised experts: each token's own experts, by
the values of their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from trencadis.backends.cpu.expert_mlp import SeparateExperts, run_chosen_experts
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight, dequantise, product
from trencadis.backends.cuda.weights.stacked_experts import ExpertMatrix, StackedCodes, StackedExperts
from trencadis.core.device.backend import Weight

_KERNELS = torch.library.Library("trencadis_twin", "DEF")  # type: ignore[no-untyped-call]


def register_op(schema: str, function: Callable[..., Tensor]) -> None:
    """Registers an operator of ``schema``, which a graph records as one call."""
    _KERNELS.define(schema)  # type: ignore[no-untyped-call]
    _KERNELS.impl(schema.partition("(")[0], function, "CPU")  # type: ignore[no-untyped-call]


_DECODED = WeakTensorKeyDictionary()
"""Codes -> their values: the twin decodes a weight only once, while a kernel does so for every product."""


def decode_once(codes: Tensor, decode: Callable[[], Tensor]) -> Tensor:
    """Returns ``decode()`` of the first call with these codes."""
    if codes not in _DECODED:
        _DECODED[codes] = decode()
    found: Tensor = _DECODED[codes]
    return found


def call(x: Tensor, scores: Tensor, w: StackedExperts, top: int, normalise: bool, kind: str) -> Tensor:
    """Implements ``core.device.backend.Ops.experts`` of experts of which some are codes."""
    room = x.new_empty((len(x) * top, w.inner + x.shape[1]))  # what a card holds between its kernels
    out: Tensor = torch.ops.trencadis_twin.coded_experts(
        x, scores, *_flatten(w.gate_up), *_flatten(w.down), w.gate_up_bias, w.down_bias, w.inner, top, normalise, kind,
        room,
    )  # fmt: skip
    return out


def _flatten(w: ExpertMatrix) -> tuple[list[Tensor | None], list[int]]:
    """Returns the tensors of a matrix and its numbers; none of a matrix that is no codes."""
    if isinstance(w, Tensor):
        return [w], []
    return [w.codes, w.factor, w.scale, w.zero, w.gather], [w.kind, w.columns, w.group, w.rounds, w.in_features]


def _matrices(parts: Sequence[Tensor | None], numbers: Sequence[int], bias: Tensor | None) -> list[TwinMatrix]:
    """Returns the matrix of each expert, and its values if it is codes."""
    first = parts[0]
    assert first is not None
    biases = [None] * len(first) if bias is None else list(bias)
    if not numbers:
        return [TwinMatrix(one, None, own) for one, own in zip(first, biases, strict=True)]
    codes, factor, scale, zero, gather = parts
    assert codes is not None and factor is not None
    kind, columns, group, rounds, inputs = numbers
    stack = StackedCodes(codes, factor, scale, zero, gather, kind, columns, group, bool(rounds), inputs)
    each = [stack.matrix(i, own) for i, own in enumerate(biases)]
    values = decode_once(codes, lambda: torch.stack([dequantise(w) for w in each]))
    return [TwinMatrix(one, w, own) for one, w, own in zip(values, each, biases, strict=True)]


class TwinMatrix(NamedTuple):
    """A matrix of one expert: ``values`` [out, in] in the order of its stored columns, and its codes if it has any."""

    values: Tensor
    codes: QuantisedWeight | None
    bias: Tensor | None


class _ExpertOps(ReferenceOps):
    """Ops whose linear layers are ``TwinMatrix``."""

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        assert isinstance(w, TwinMatrix)
        if w.codes is not None:
            return product(x, w.codes, w.values)
        return functional.linear(x, w.values, w.bias)


def _run(
    x: Tensor, scores: Tensor, gate_up: Sequence[Tensor | None], gate_up_numbers: Sequence[int],
    down: Sequence[Tensor | None], down_numbers: Sequence[int], gate_up_bias: Tensor | None, down_bias: Tensor | None,
    inner: int, top: int, normalise: bool, kind: str, room: Tensor,
) -> Tensor:  # fmt: skip
    ups = _matrices(gate_up, gate_up_numbers, gate_up_bias)
    downs = _matrices(down, down_numbers, down_bias)
    each = SeparateExperts(cast(list[Weight], ups), cast(list[Weight], downs), len(ups), inner)
    return run_chosen_experts(_ExpertOps(), x, scores, each, top, normalise, kind)


register_op(
    "coded_experts(Tensor x, Tensor scores, Tensor?[] gate_up, int[] gate_up_numbers, Tensor?[] down, "
    "int[] down_numbers, Tensor? gate_up_bias, Tensor? down_bias, int inner, int top, bool normalise, str kind, "
    "Tensor room) -> Tensor",
    _run,
)
