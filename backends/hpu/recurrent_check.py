"""Compares the recurrent ops with the reference when a model that needs them is opened.

Public users report stores of states that a compiler drops silently, and norms that it computes wrongly. Both would give
plausible text that is wrong.
"""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.hpu.attention.attention_input_types import FreshAttn
from trencadis.backends.hpu.ops import HpuOps
from trencadis.core.device.backend import Attn
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.errors import StartupError
from trencadis.core.models.model_and_ops_api import RecurrentOps

CLOSE = 1e-3
"""Largest difference from the reference, as a share of its largest value; a store that is missing is off by about 1."""

GROUPS, HEADS, SIZE, SLOTS = 1, 2, 16, 4
WIDTHS = [GROUPS * SIZE, GROUPS * SIZE, HEADS * SIZE]
LAUNCHES = ((128, 70, 2, 2), (1, 1, 2, 3))
"""Tokens, real tokens, source and slot of the two launches of one row, which goes on from slot 2 to slot 3."""

RESULTS = ("the delta rule's result", "the state space's result")


class ProbeStates(NamedTuple):
    """The states of the probe: [slots, 3, C] of a convolution and [slots, heads, size, size], for either op."""

    conv: Tensor
    delta: Tensor
    plain_conv: Tensor
    space: Tensor


STATES = (
    "the convolution's state",
    "the delta rule's state",
    "the plain convolution's state",
    "the state space's state",
)


class RecurrentProbe:
    """A layer of the recurrent ops alone: x [n, C] are queries, keys and values, the residual [n, 2 heads] gates.

    The delta rule reads a convolution with SiLU, as in gated DeltaNet; the state space one with a bias and without an
    activation, as in short convolutions.
    """

    def __init__(self, ops: RecurrentOps, weight: Tensor, bias: Tensor, state: ProbeStates) -> None:
        self.ops, self.weight, self.bias, self.state = ops, weight, bias, state

    def __call__(self, x: Tensor, residual: Tensor, rows: RecurrentRows, attn: Attn) -> tuple[Tensor, Tensor]:
        g, beta = torch.split(residual, [HEADS, HEADS], dim=1)
        mixed = self.ops.causal_conv(x, self.weight, None, self.state.conv, rows, attn, "silu")
        q, k, v = _split(mixed)
        out = self.ops.delta_rule(q, k, v, g, beta, self.state.delta, rows, attn)
        plain = self.ops.causal_conv(x, self.weight, self.bias, self.state.plain_conv, rows, attn, "")
        q, k, v = _split(plain)
        scanned = self.ops.state_space(q, k, v, g, beta, self.state.space, rows, attn)
        return out.reshape(len(x), -1) * 2, scanned.reshape(len(x), -1) * 2


def _split(mixed: Tensor) -> list[Tensor]:
    """Returns queries, keys and values [n, heads, size]."""
    return [t.reshape(len(mixed), -1, SIZE) for t in torch.split(mixed, WIDTHS, dim=1)]


class ProbeLaunch(nn.Module):
    """A launch of the probe, as a module that lazy mode runs as one launch."""

    def __init__(self, ops: HpuOps, probe: RecurrentProbe) -> None:
        super().__init__()
        self.ops, self.probe = ops, probe

    def forward(
        self, x: Tensor, gates: Tensor, slots: Tensor, length: Tensor, *rows: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        attn = FreshAttn(slots, length)
        prepared = self.ops.prepare_recurrent(RecurrentRows(*rows), attn)
        return self.ops.layer(self.probe, x, gates, prepared, attn)


def check_recurrent(ops: HpuOps) -> float:
    """Runs a prompt and a token on the card and on the reference; returns the largest difference as a share.

    Raises:
        StartupError: one line, if results or states differ, or the card cannot run them.
    """
    try:
        with torch.no_grad(), redirect_stderr(StringIO()):  # a graph that fails prints its code
            name, off = _largest_error(ops)
    except StartupError:
        raise
    except Exception as error:  # whatever a release raises for an operation that it lacks or refuses
        text = " ".join(str(error).split())[:200]
        raise StartupError(f"hpu: this software cannot run recurrent layers: {type(error).__name__}: {text}") from None
    if not off <= CLOSE:
        raise StartupError(
            f"hpu: this software computes recurrent layers wrongly: {name} is off by {off:.1e} of its largest value "
            f"(allowed: {CLOSE:.0e}), so this model cannot be served with it; try the other mode (PT_HPU_LAZY_MODE) or "
            "another release"
        )
    return off


def _largest_error(ops: HpuOps) -> tuple[str, float]:
    """Returns what differs most from the reference, and by how much."""
    g, device, plain = torch.Generator().manual_seed(7), ops.bridge.device, ReferenceOps()
    weight, bias = torch.randn(sum(WIDTHS), 4, generator=g) / 2, torch.randn(sum(WIDTHS), generator=g) / 2
    shapes = ((SLOTS, 3, sum(WIDTHS)), (SLOTS, HEADS, SIZE, SIZE)) * 2
    host = ProbeStates(*(torch.randn(shape, generator=g) for shape in shapes))
    there = ProbeStates(*(t.to(device) for t in host))
    mine = RecurrentProbe(ops, weight.to(device), bias.to(device), there)
    theirs = RecurrentProbe(plain, weight, bias, host)
    errors = list[tuple[str, float]]()
    for tokens, real, source, slot in LAUNCHES:
        x, gates = torch.randn(tokens, sum(WIDTHS), generator=g), torch.rand(tokens, 2 * HEADS, generator=g)
        gates = torch.cat([-functional.softplus(gates[:, :HEADS]), gates[:, HEADS:]], 1)
        rows, slots = _rows(real, source, slot), torch.zeros(tokens, dtype=torch.int64)
        start = torch.tensor([0, real, tokens], dtype=torch.int32)
        attn = Attn(start, start[:2], start[:2, None], slots)
        wanted = theirs(x, gates, plain.prepare_recurrent(rows, attn), attn)
        launch = ProbeLaunch(ops, mine)
        call = ops.bridge.wrap_in_hpu_graph(launch) if ops.lazy else launch
        inputs = [t.to(device) for t in (x, gates, slots, start[1:2], *rows)]
        how = {"bypass_hpu_graphs": True} if ops.lazy else {}  # a graph's memory would not be given back
        with ops.check_context():
            out = call(*inputs, **how)
        ops.bridge.mark_step()
        for name, found, expected in zip(RESULTS, out, wanted, strict=True):
            errors.append((f"{name} of {real} tokens", _error(found.cpu()[:real], expected[:real])))
        for name, found, expected in zip(STATES, there, host, strict=True):
            errors.append((f"{name} after {real} tokens", _error(found.cpu()[1:], expected[1:])))
    return max(errors, key=lambda one: one[1] if one[1] == one[1] else float("inf"))


def _rows(count: int, source: int, slot: int) -> RecurrentRows:
    """Returns one row, which begins if it stays in its slot, and the entry of the padding."""
    number = torch.tensor([count, 0], dtype=torch.int32)
    begins = torch.tensor([int(source == slot), 1], dtype=torch.int32)
    return RecurrentRows(torch.tensor([slot, 0]), begins, torch.tensor([source, 0]), number)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).abs().max() / wanted.abs().max())
