"""The recurrent ops on Gaudi equal the reference in both modes, and store states in place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.random_recurrent import NAN, off, rows_of, seeded
from trencadis.backends.cpu.recurrent_ops import CHUNK, scan_rows
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.hpu import hpu_recurrent_ops
from trencadis.backends.hpu import ops as hpu_ops
from trencadis.backends.hpu.attention.attention_input_types import FreshAttn
from trencadis.backends.hpu.recurrent_check import check_recurrent
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.errors import StartupError

pytestmark = pytest.mark.part("gaudi")
GROUPS, HEADS, SIZE, SLOTS = 2, 4, 16, 9
WIDTHS = [GROUPS * SIZE, GROUPS * SIZE, HEADS * SIZE]


class States(NamedTuple):
    conv: Tensor
    state: Tensor


class Layer:
    """The recurrent ops of a layer: x holds queries, keys and values, the residual stream the gates."""

    def __init__(self, ops: Any, weight: Tensor, state: States) -> None:
        self.ops, self.weight, self.state = ops, weight, state

    def __call__(self, x: Tensor, residual: Tensor, rows: Any, attn: Any) -> tuple[Tensor, Tensor]:
        mixed = self.ops.causal_conv(x, self.weight, None, self.state.conv, rows, attn, "silu")
        q, k, v = (t.reshape(len(x), -1, SIZE) for t in torch.split(mixed, WIDTHS, dim=1))
        g, beta = torch.split(residual, [HEADS, HEADS], dim=1)
        out = self.ops.delta_rule(q, k, v, g, beta, self.state.state, rows, attn)
        return 2 * out.reshape(len(x), -1), residual  # a layer returns no view


class ScanLayer(Layer):
    """The same with a state space in place of the delta rule."""

    def __call__(self, x: Tensor, residual: Tensor, rows: Any, attn: Any) -> tuple[Tensor, Tensor]:
        q, k, v = (t.reshape(len(x), -1, SIZE) for t in torch.split(x, WIDTHS, dim=1))
        g, steps = torch.split(residual, [HEADS, HEADS], dim=1)
        out = self.ops.state_space(q, k, v, g, steps, self.state.state, rows, attn)
        return 2 * out.reshape(len(x), -1), residual


class Case:
    """Rows of a launch: tokens, gates, weights and states."""

    def __init__(self, counts: Sequence[int], seed: int = 1) -> None:
        random, n = seeded(seed), sum(counts)
        self.counts, self.x = list(counts), torch.randn(n, sum(WIDTHS), generator=random)
        gates = torch.randn(n, 2 * HEADS, generator=random)
        self.gates = torch.cat([-torch.nn.functional.softplus(gates[:, :HEADS]), gates[:, HEADS:].sigmoid()], 1)
        self.weight = torch.randn(sum(WIDTHS), 4, generator=random) / 2
        self.states = States(
            torch.randn(SLOTS, 3, sum(WIDTHS), generator=random),
            torch.randn(SLOTS, HEADS, SIZE, SIZE, generator=random),
        )

    def reference(self, kind: type[Layer] = Layer, **how: Any) -> tuple[Tensor, States]:
        """Returns results and states after the launch, by the reference."""
        states = States(*(t.clone() for t in self.states))
        ops = ReferenceOps()
        rows, attn = rows_of(self.counts, **how)
        return kind(ops, self.weight, states)(self.x, self.gates, ops.prepare_recurrent(rows, attn), attn)[0], states

    def ran(self, backend: Any, layer: Layer, many: int, width: int, **how: Any) -> Tensor:
        """Runs ``layer`` on a launch of ``many`` rows of ``width`` tokens; padding is NaN."""
        rows, _ = rows_of(self.counts, padding_rows=many - len(self.counts), **how)
        at = torch.cat([row * width + torch.arange(count) for row, count in enumerate(self.counts)])
        x, gates = (torch.full((many * width, t.shape[1]), NAN) for t in (self.x, self.gates))
        x[at], gates[at] = self.x, self.gates
        on = [t.to(backend.device) for t in (x, gates)]
        rows = RecurrentRows(*(t.to(backend.device) for t in rows))
        slot = torch.zeros(many * width, dtype=torch.int64)
        attn = FreshAttn(slot.to(backend.device), slot[:many].int().to(backend.device))
        ops = backend.ops
        with backend.card.launch() if ops.lazy else nullcontext(), torch.no_grad():
            out, _ = ops.layer(layer, *on, ops.prepare_recurrent(rows, attn), attn)
        found: Tensor = out.cpu()
        assert torch.isfinite(found).all()
        return found[at]

    def layer(self, backend: Any, kind: type[Layer] = Layer) -> Layer:
        states = States(*(t.to(backend.device) for t in self.states))
        return kind(backend.ops, self.weight.to(backend.device), states)


LAUNCHES = {
    "fresh": ([70, 3, 64, 1], 5, 96),
    "fresh, a multiple of the chunk": ([128, 65, 2], 4, 128),
    "context": ([130], 1, 160),
    "decode": ([1, 1, 1], 4, 1),
}


@pytest.mark.parametrize(("name", "lazy"), [
    pytest.param(name, lazy, marks=[pytest.mark.long] if "multiple" in name and not lazy else [])
    for name in LAUNCHES for lazy in (True, False)
])  # fmt: skip
def test_launches_equal_the_reference(name: str, lazy: bool, hpu: Callable[..., Any]) -> None:
    counts, many, width = LAUNCHES[name]
    case, backend = Case(counts), hpu(lazy=lazy)
    sources = [1 + row for row in range(len(counts))]
    sources[-1], begins = 7, [1] if len(counts) > 1 else []
    for t in case.states:
        t[[0, 2] if begins else 0] = NAN
    layer = case.layer(backend)
    found = case.ran(backend, layer, many, width, begins=begins, sources=sources)
    wanted, states = case.reference(begins=begins, sources=sources)
    assert off(found, wanted) < 3e-6
    for own, other in zip(layer.state, states, strict=True):
        assert off(own.cpu()[1:], other[1:]) < 3e-6
    if not lazy:
        assert backend.card.clock.written_anew == 0, "a store wrote the states of every slot"
        assert not any("eager" in line for line in backend.card.clock.lines), backend.card.clock.lines


@pytest.mark.parametrize(("name", "lazy"), [
    ("fresh", True), ("decode", True), ("decode", False), pytest.param("fresh", False, marks=pytest.mark.long),
])  # fmt: skip
def test_state_spaces_equal_the_reference(name: str, lazy: bool, hpu: Callable[..., Any]) -> None:
    counts, many, width = LAUNCHES[name]
    case, backend, how = Case(counts), hpu(lazy=lazy), {"begins": [1]}
    for t in case.states:
        t[[0, 2]] = NAN
    layer = case.layer(backend, ScanLayer)
    found = case.ran(backend, layer, many, width, **how)
    wanted, states = case.reference(ScanLayer, **how)
    assert off(found, wanted) < 3e-6 and off(layer.state.state.cpu()[1:], states.state[1:]) < 3e-6
    assert lazy or backend.card.clock.written_anew == 0, "a store wrote the states of every slot"


CUTS = ((64, 64), (128, 192), (1, 1))
"""Tokens of each launch, and its width."""


@pytest.mark.parametrize(("lazy", "cuts"), [
    (True, CUTS), (False, ((64, 64), (64, 64), (1, 1))), pytest.param(False, CUTS, marks=pytest.mark.long),
])  # fmt: skip
def test_cuts_at_multiples_of_64_give_the_same_bits(lazy: bool, cuts: Any, hpu: Callable[..., Any]) -> None:
    """A prompt whole, and in launches of other shapes, the last of which decodes one token."""
    total = sum(count for count, _ in cuts)
    case, backend = Case([total]), hpu(lazy=lazy)
    layer = case.layer(backend)
    whole = case.ran(backend, layer, 1, total + 63, begins=[0])
    other, parts, start = case.layer(backend), [], 0
    for count, width in cuts:
        some = Case([count])
        part = slice(start, start + count)
        some.x, some.gates = case.x[part], case.gates[part]
        parts.append(some.ran(backend, other, 1, width, begins=[] if start else [0]))
        start += count
    assert torch.equal(torch.cat(parts), whole)
    assert all(torch.equal(a.cpu()[1:], b.cpu()[1:]) for a, b in zip(layer.state, other.state, strict=True))


@pytest.mark.parametrize("alike", [0.0, 0.99, 1.0])
@pytest.mark.parametrize("beta", [0.5, 0.98, 1.0])
def test_inverse_is_as_exact_as_a_triangular_solve(alike: float, beta: float) -> None:
    """Also for nearly equal keys, where a product of powers is off by 4e9."""
    random = seeded(4)
    k = torch.randn(6, CHUNK, 128, generator=random) * (1 - alike) + torch.randn(6, 1, 128, generator=random) * alike
    k = k / k.norm(dim=-1, keepdim=True)
    lower = (k * beta @ k.transpose(1, 2)).tril(-1)
    rows, _ = rows_of([CHUNK])
    found = hpu_recurrent_ops.invert(lower, hpu_recurrent_ops.prepare(rows, CHUNK).pairs)
    exact = torch.linalg.inv(lower.double() + torch.eye(CHUNK, dtype=torch.float64))
    assert off(found, exact) < 3e-6
    assert torch.equal(found.triu(1), torch.zeros_like(found))


@pytest.mark.parametrize("lazy", [True, False])
def test_opening_checks_one_launch_and_says_what_is_wrong(
    lazy: bool, hpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right launch and a wrong result are those of the test below, in both modes."""
    if lazy:
        assert check_recurrent(hpu(lazy=lazy).ops) < 1e-5
    conv: Any = hpu_recurrent_ops.convolve
    scan = hpu_recurrent_ops._scan_slab

    def off_by_a_chunk(x: Any, state: Tensor, pairs: Tensor) -> Any:
        out, kept = scan(x, state, pairs)
        return out, kept * 1.01

    faults: tuple[tuple[str, Any, str], ...] = (("store_states", lambda *args: None, "the delta rule's"),)
    if lazy:
        faults = (
            ("write_state", lambda *args: None, "the delta rule's"),
            ("EPS", 1.0, "the delta rule's result"),
            ("convolve", lambda *args: conv(*args[:5], "silu"), "the state space's"),
            ("convolve", lambda x, weight, bias, *args: conv(x, weight, None, *args), "the state space's"),
            ("_scan_slab", off_by_a_chunk, "the state space's state"),
            ("scan_rows", lambda x, state: scan_rows(x._replace(g=x.g * 0), state), "the state space's"),
        )
    for name, fault, said in faults:
        for module in (hpu_recurrent_ops, hpu_ops):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fault)
        with pytest.raises(StartupError, match=f"computes recurrent layers wrongly: {said}"):
            check_recurrent(hpu(lazy=lazy).ops)
        monkeypatch.undo()


@pytest.mark.parametrize("lazy", [True, False])
def test_opening_leaves_nothing_on_the_card(
    lazy: bool, hpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend of a model with recurrent layers checks them when it is opened, and no other backend does."""
    plain, checked = (hpu(lazy=lazy, recurrent=needs) for needs in (False, True))
    gc.collect()
    used, after = (dict(backend.card.allocator.used) for backend in (plain, checked))
    workspace = after.pop("workspace", 0)  # it is the largest launch's, and stays for those that follow
    assert {kind: size for kind, size in after.items() if size != used.get(kind, 0)} == {}
    assert workspace < 700_000
    monkeypatch.setattr(hpu_recurrent_ops, "EPS", 1.0)
    hpu(lazy=lazy)
    with pytest.raises(StartupError, match="computes recurrent layers wrongly"):
        hpu(lazy=lazy, recurrent=True)
