"""Quantised matrices of all experts of a layer, stacked: the codes of the checkpoint, and what decodes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight, pack_quantised_weight
from trencadis.core.device.backend import ExpertBiases
from trencadis.core.quant.quantised_tensor import QTensor


@dataclass(slots=True)
class StackedCodes:
    """One matrix [out, in] of each of ``count`` experts, packed as a ``QuantisedWeight`` is.

    Args:
        codes: [count, out, bytes].
        factor: float32 [count, out].
        scale: [count, groups, out]; None: only the factor.
        zero: int8 [count, groups or 1, out]; None: no zero points.
        gather: int32 [count, columns], the input's column of each column; None: in order.
        kind, columns, group, rounds: of each matrix, as in ``QuantisedWeight``.
    """

    codes: Tensor
    factor: Tensor
    scale: Tensor | None
    zero: Tensor | None
    gather: Tensor | None
    kind: int
    columns: int
    group: int
    rounds: bool
    in_features: int

    @property
    def shape(self) -> torch.Size:
        """(experts, outputs, inputs)."""
        return torch.Size((*self.codes.shape[:2], self.in_features))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = (self.codes, self.factor, self.scale, self.zero, self.gather)
        return sum(t.nbytes for t in held if t is not None)

    def matrix(self, expert: int, bias: Tensor | None = None) -> QuantisedWeight:
        """Returns the matrix of one expert, a view."""
        scale, zero, gather = (None if t is None else t[expert] for t in (self.scale, self.zero, self.gather))
        return QuantisedWeight(
            self.codes[expert], self.factor[expert], scale, zero, gather, bias, self.kind, self.columns, self.group,
            self.rounds, self.codes.shape[1], self.in_features,
        )  # fmt: skip


ExpertMatrix = Tensor | StackedCodes
"""A matrix of all experts [count, out, in]: in the engine's dtype, or codes."""


@dataclass
class StackedExperts:
    """The experts of a layer: gate_up [count, 2 inner, hidden], or [count, inner, hidden] without gates, and down
    [count, hidden, inner]; of each, all experts in the engine's dtype or all as codes.
    """

    gate_up: ExpertMatrix
    down: ExpertMatrix
    count: int
    inner: int
    gate_up_bias: Tensor | None = None  # [count, 2 inner]
    down_bias: Tensor | None = None  # [count, hidden]

    @property
    def gated(self) -> bool:
        """True if experts have gates."""
        return self.gate_up.shape[1] == 2 * self.inner

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, without biases."""
        return self.gate_up.nbytes + self.down.nbytes


def stack_experts(
    gate_up: Sequence[Tensor | QTensor], down: Sequence[Tensor | QTensor], biases: ExpertBiases | None, arch: int
) -> StackedExperts:
    """Stacks gate_up and down of each expert for a card of compute capability ``arch`` / 10; codes stay codes.

    Raises:
        StartupError: a code of a float is not finite.
    """
    made = StackedExperts(stack_matrices(gate_up, arch), stack_matrices(down, arch), len(down), down[0].shape[1])
    if biases is not None:
        made.gate_up_bias, made.down_bias = (torch.stack(list(some)) for some in biases)
    return made


def stack_matrices(some: Sequence[Tensor | QTensor], arch: int) -> ExpertMatrix:
    """Stacks a matrix of each expert; where not all are codes of one form, their values in the engine's dtype."""
    coded = [one for one in some if isinstance(one, QTensor)]
    if len(coded) == len(some):
        found = _stack_codes(coded, arch)
        if found is not None:
            return found
    return torch.stack([one if isinstance(one, Tensor) else one.values() for one in some])


def _stack_codes(some: Sequence[QTensor], arch: int) -> StackedCodes | None:
    """Packs each matrix into its place of the stack, so that no second copy of all of them is held; None if their forms
    differ.
    """
    first = pack_quantised_weight(some[0], None, arch)
    ordered = first.gather is not None or any(q.order is not None and q.scale.shape[1] > 1 for q in some)
    made = StackedCodes(
        _room(first.codes, len(some)), _room(first.factor, len(some)),
        None if first.scale is None else _room(first.scale, len(some)),
        None if first.zero is None else _room(first.zero, len(some)),
        torch.empty((len(some), first.columns), dtype=torch.int32, device=first.codes.device) if ordered else None,
        first.kind, first.columns, first.group, first.rounds, first.in_features,
    )  # fmt: skip
    for i, q in enumerate(some[:1] if first.codes.is_meta else some):  # plan --time: there are no values
        one = first if i == 0 else pack_quantised_weight(q, None, arch)
        if _form(one) != _form(first):
            return None
        _put(made, one, i)
    return made


def _room(part: Tensor, count: int) -> Tensor:
    return part.new_empty((count, *part.shape))


def _form(w: QuantisedWeight) -> tuple[object, ...]:
    """Returns what must be equal in all experts: kinds, shapes and dtypes, but for the order of columns."""
    parts = tuple(None if t is None else (t.shape, t.dtype) for t in (w.codes, w.scale, w.zero))
    return w.kind, w.columns, w.group, w.rounds, w.in_features, parts


def _put(stack: StackedCodes, one: QuantisedWeight, place: int) -> None:
    pairs = ((stack.codes, one.codes), (stack.factor, one.factor), (stack.scale, one.scale), (stack.zero, one.zero))
    for held, part in pairs:
        if held is not None and part is not None:
            held[place].copy_(part)
    if stack.gather is not None:  # a matrix whose columns are in order has none
        plain = torch.arange(one.columns, dtype=torch.int32, device=one.codes.device)
        stack.gather[place].copy_(plain if one.gather is None else one.gather)
