"""Experts on the CPU: the routing of tokens, the product over all experts, and the product over chosen experts only.

The product over all is the specification: it has static shapes and reads nothing on the host, so that a device which
records graphs can inherit it. Gates and ups of all experts are one wide matrix and downs another; between them, values
of experts that a token did not choose are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cpu.native.expert_kernels import ExpertTable, make_table
from trencadis.core.device.backend import ExpertBiases, Weight

ROWS = 8192
"""Maximum rows (tokens times experts) that the product over all experts holds at a time."""


@dataclass
class JoinedExperts:
    """All experts as two matrices: gate_up [count x 2 inner, hidden], down [count x inner, hidden].

    Of experts without gates, gate_up is [count x inner, hidden].
    """

    gate_up: Tensor
    down: Tensor
    count: int
    inner: int
    gate_up_bias: Tensor | None = None  # [count x 2 inner]
    down_bias: Tensor | None = None  # [count, hidden]


@dataclass
class SeparateExperts:
    """Packed weights of each expert."""

    gate_up: list[Weight]
    down: list[Weight]
    count: int
    inner: int
    nbytes: int = 0

    @cached_property
    def table(self) -> ExpertTable | None:
        """Addresses of all experts for the library's kernels; None: it does not multiply some of them."""
        return make_table(self.gate_up, self.down, self.inner)


def join_experts(
    gate_up: Sequence[Tensor], down: Sequence[Tensor], biases: ExpertBiases | None = None
) -> JoinedExperts:
    """Joins gate_up [2 inner, hidden], or [inner, hidden] without gates, and down [hidden, inner] of each expert."""
    inner = down[0].shape[1]
    made = JoinedExperts(torch.cat(list(gate_up)), torch.cat([d.t() for d in down]), len(down), inner)
    if biases is not None:
        made.gate_up_bias, made.down_bias = torch.cat(list(biases.gate_up)), torch.stack(list(biases.down))
    return made


class RoutedTokens(NamedTuple):
    """The experts of each token, the best first, int64 [n, top], and the weights of their outputs, float32 [n, top]."""

    shares: Tensor
    experts: Tensor


def route_tokens(scores: Tensor, top: int, normalise: bool) -> RoutedTokens:
    """Chooses the ``top`` best-scored experts of each token, of equal scores [n, count] the lower number.

    Their shares are those of the softmax over all experts, which add up to 1 if ``normalise``. Scores are ranked, not
    shares: different scores may have equal shares, and a tie must choose alike in every kernel of a device.
    """
    wide, last = scores.float() + 0.0, scores.shape[1] - 1  # the sum makes both zeros one score
    bits = wide.view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the scores
    # Numbers in which no two experts are equal: topk takes any of equal ones, and a stable sort is five times slower.
    ranked = (order << 32) | torch.arange(last, -1, -1, device=scores.device)
    experts = last - (ranked.topk(top).values & 0x7FFFFFFF)
    shares = wide.softmax(-1).gather(1, experts)
    return RoutedTokens(shares / shares.sum(-1, keepdim=True) if normalise else shares, experts)


class ActivationOps(Protocol):
    """The activations of ``core.device.backend.Ops``."""

    def act(self, x: Tensor, kind: str) -> Tensor: ...

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor: ...


def activate(ops: ActivationOps, x: Tensor, inner: int, kind: str) -> Tensor:
    """Returns what the second matrix of experts of ``inner`` columns reads, [n, inner]: of gates and ups [n, 2 inner],
    or of ups alone.
    """
    return ops.act(x, kind) if x.shape[1] == inner else ops.act_mul(x, kind)


def run_all_experts(
    ops: Any, x: Tensor, scores: Tensor, w: JoinedExperts, top: int, normalise: bool, kind: str
) -> Tensor:
    """Implements ``backend.Ops.experts`` over all experts, ``ROWS`` rows at a time; other experts have share zero."""
    shares, chosen = ops.route_tokens(scores, top, normalise)
    n, wide = len(x), len(w.gate_up) // w.count
    every = torch.zeros((n, w.count), dtype=torch.float32, device=x.device).scatter(1, chosen, shares)
    many = min(max(ROWS // max(n, 1), 1), w.count)
    out: Tensor | None = None
    for first in range(0, w.count, many):
        count = min(many, w.count - first)
        last = first + count
        rows = slice(first * wide, last * wide)
        gate_up = functional.linear(x, w.gate_up[rows], None if w.gate_up_bias is None else w.gate_up_bias[rows])
        made = activate(ops, gate_up.reshape(n * count, wide), w.inner, kind).view(n, count, w.inner)
        share = every[:, first:last, None]
        # Not only a product: an expert that no token chose may overflow, and infinity times zero is NaN.
        taken = torch.where(share > 0, made * share.to(x.dtype), 0.0).to(x.dtype)
        part = taken.view(n, count * w.inner) @ w.down[first * w.inner : last * w.inner]
        if w.down_bias is not None:
            part = part + every[:, first:last].to(x.dtype) @ w.down_bias[first:last]
        out = part if out is None else out + part
    assert out is not None
    return out


def run_chosen_experts(
    ops: Any, x: Tensor, scores: Tensor, w: SeparateExperts, top: int, normalise: bool, kind: str
) -> Tensor:
    """Computes the same as ``run_all_experts``, but loops over experts and reads only the weights of chosen ones.

    A token's sum runs from its best expert to its least, whatever the other tokens chose.
    """
    shares, chosen = route_tokens(scores, top, normalise)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=w.count).tolist()
    rows = x.index_select(0, order // top)
    made = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            inner = activate(ops, ops.linear(rows[start:stop], w.gate_up[expert]), w.inner, kind)
            made[start:stop] = ops.linear(inner, w.down[expert])
            start = stop
    parts = torch.empty_like(made)
    parts[order] = made
    parts = parts.view(len(x), top, -1) * shares.to(x.dtype)[..., None]
    out = parts[:, 0].clone()
    for i in range(1, top):
        out.add_(parts[:, i])
    return out
