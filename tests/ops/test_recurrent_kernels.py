"""The library's kernels of the recurrent ops are held to float64 and to the reference, by each kind of kernels."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests import kernel_kinds
from tests.random_recurrent import NAN, delta_case, exact_rule, exact_scan, off, rows_of, seeded
from trencadis.backends.cpu.native import recurrent_kernels
from trencadis.backends.cpu.native.kernel_choice_by_cpu import TORCH
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.device.backend import Attn
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.model_and_ops_api import DeltaNetWeights, RecurrentState

KINDS = pytest.mark.parametrize("kind", kernel_kinds.OWN)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
BOUND = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@KINDS
@TYPES
@pytest.mark.parametrize("plain", [False, True], ids=["delta rule", "state space"])
def test_delta_rule_equals_float64(kind: str, dtype: torch.dtype, plain: bool) -> None:
    table, counts, begins = kernel_kinds.table(kind), [1, 3, 64, 130, 17, 1, 65], [2, 4, 5]
    for heads, size in (((1, 3), 16), ((2, 4), 128)):
        case = delta_case(sum(counts) + 5, heads, size, slots=len(counts) + 2, dtype=dtype)
        case.state[[0, 3, 5]], case.q[-5:], case.v[-5:] = NAN, NAN, NAN
        before = case.state.clone()
        rows, attn = rows_of(counts, begins=begins, padding=5, padding_rows=2)
        with kernel_kinds.served("delta_rule", table):
            found = recurrent_kernels.delta_rule(*case, rows, attn, table, plain)
        assert found is not None and found.dtype == dtype and not found[-5:].any()
        start = 0
        for row, count in enumerate(counts):
            part = case.tokens(slice(start, start + count))
            held = torch.zeros_like(before[0]) if row in begins else before[row + 1]
            wanted, state = (exact_scan if plain else exact_rule)(part, held)
            assert off(found[start : start + count], wanted) < BOUND[dtype], (row, size)
            assert off(case.state[row + 1], state) < 3e-6, (row, size)
            start += count


@KINDS
@pytest.mark.parametrize("alike", [0.9, 0.999])
def test_nearly_equal_keys_stay_near_float64(kind: str, alike: float) -> None:
    case = delta_case(400, heads=(1, 2), alike=alike)
    wanted, state = exact_rule(case, case.state[1])
    found = recurrent_kernels.delta_rule(*case, *rows_of([400]), kernel_kinds.table(kind))
    assert found is not None and off(found, wanted) < 1e-5 and off(case.state[1], state) < 1e-5


@KINDS
@TYPES
def test_bits_depend_neither_on_threads_nor_on_other_rows_nor_on_cuts(kind: str, dtype: torch.dtype) -> None:
    table, counts = kernel_kinds.table(kind), [200, 1, 66, 1, 30]
    case, made = delta_case(sum(counts), slots=7, dtype=dtype), []
    for count in (1, 2, 3, 8):
        with kernel_kinds.threads(count):
            own = case.copied()
            out = recurrent_kernels.delta_rule(*own, *rows_of(counts, begins=[4]), table)
            assert out is not None
            made.append((out, own.state))
    assert all(torch.equal(out, made[0][0]) and torch.equal(state, made[0][1]) for out, state in made)
    alone, start = case.copied(), 0
    for row, count in enumerate(counts):
        for at in range(0, count, 64):
            part = slice(start + at, start + min(at + 64, count))
            begins = [0] if row == 4 and not at else []
            out = recurrent_kernels.delta_rule(
                *alone.tokens(part), *rows_of([part.stop - part.start], [row + 1], begins), table
            )
            assert out is not None and torch.equal(out, made[0][0][part]), (row, at)
        start += count
    assert torch.equal(alone.state, made[0][1])


@KINDS
@TYPES
def test_convolution_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    table, counts, begins, random = kernel_kinds.table(kind), [1, 7, 2, 150, 3], [1, 4], seeded(3)
    for channels, taps in ((5, 2), (40, 3), (300, 4), (130, 8)):
        fused = torch.randn(sum(counts) + 4, channels + 3, generator=random).to(dtype)
        fused[sum(counts) :] = NAN
        x, weight = fused[:, :channels], torch.randn(channels, taps, generator=random).to(dtype)
        bias = torch.randn(channels, generator=random).to(dtype) if taps == 3 else None
        state = torch.randn(len(counts) + 3, taps - 1, channels, generator=random).to(dtype)
        state[[0, 2]] = NAN
        sources = [1, 2, 3, 7, 5]
        for activation in ("silu", ""):
            own, others = state.clone(), state.clone()
            rows, attn = rows_of(counts, begins=begins, sources=sources, padding=4, padding_rows=1)
            with kernel_kinds.served("convolution", table):
                found = recurrent_kernels.causal_conv(x, weight, bias, own, rows, attn, activation, table)
            wanted = ReferenceOps().causal_conv(x, weight, bias, others, rows, attn, activation)
            assert found is not None and off(found, wanted) < BOUND[dtype], (channels, taps)
            assert torch.equal(own[1:], others[1:]) and not found[-4:].any()
            with kernel_kinds.threads(8):
                again = recurrent_kernels.causal_conv(x, weight, bias, state.clone(), rows, attn, activation, table)
            assert again is not None and torch.equal(again, found)


def test_what_the_library_does_not_compute_torch_does() -> None:
    rows, table = rows_of([4]), kernel_kinds.table(TORCH)
    x, weight, state = torch.randn(4, 6), torch.randn(6, 4), torch.randn(2, 3, 6)
    assert recurrent_kernels.causal_conv(x, weight, None, state, *rows, "silu", table) is None
    assert recurrent_kernels.delta_rule(*delta_case(4), *rows, table) is None
    for kind in kernel_kinds.OWN:
        table = kernel_kinds.table(kind)
        assert recurrent_kernels.delta_rule(*delta_case(4, size=24), *rows, table) is None
        assert recurrent_kernels.causal_conv(x, weight, None, state, *rows, "relu", table) is None
        assert recurrent_kernels.causal_conv(x, torch.randn(6, 9), None, torch.randn(2, 8, 6), *rows, "", table) is None
        assert recurrent_kernels.causal_conv(x, weight, None, state.bfloat16(), *rows, "", table) is None


class NetCase(NamedTuple):
    """Operands of ``FusedDeltaOps.delta_net`` without rows."""

    x: torch.Tensor
    gates: torch.Tensor
    weights: DeltaNetWeights
    held: RecurrentState

    def computed_apart(self, rows: RecurrentRows, attn: Attn) -> torch.Tensor:
        """The layer by the reference's separate ops, as ``GatedDeltaNet`` calls them."""
        w, ops, (n, heads, dv) = (
            self.weights,
            ReferenceOps(),
            (len(self.x), len(self.weights.decay), len(self.weights.norm)),
        )
        keys = (self.x.shape[1] - heads * dv) // 2
        assert self.held.state is not None
        mixed = ops.causal_conv(self.x, w.conv, None, self.held.conv, rows, attn, "silu")
        q, k, v = torch.split(mixed, [keys, keys, heads * dv], dim=1)
        z, b, a = torch.split(self.gates, [heads * dv, heads, heads], dim=1)
        g = w.decay * torch.nn.functional.softplus(a.float() + w.shift)
        y = ops.delta_rule(
            q.reshape(n, w.key_heads, -1), k.reshape(n, w.key_heads, -1), v.reshape(n, heads, dv), g,
            b.float().sigmoid(), self.held.state, rows, attn,
        )  # fmt: skip
        return ops.gated_norm(y, w.norm, w.eps, z)

    def copied(self) -> NetCase:
        assert self.held.state is not None
        return self._replace(held=RecurrentState(self.held.conv.clone(), self.held.state.clone()))

    def tokens(self, part: slice) -> NetCase:
        return self._replace(x=self.x[part], gates=self.gates[part])


def net_case(n: int, heads: tuple[int, int], size: int, dtype: torch.dtype, slots: int = 8) -> NetCase:
    """Random operands; gates have a wider row than they need, as parts of a fused projection have."""
    make = seeded(n)
    channels, values = 2 * heads[0] * size + heads[1] * size, heads[1] * size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make)

    gates = 8 * normal(n, values + 2 * heads[1] + 3)
    weights = DeltaNetWeights(
        normal(channels, 4).to(dtype), -normal(heads[1]).exp(), normal(heads[1]), normal(size).to(dtype), 1e-6, heads[0]
    )
    held = RecurrentState(normal(slots, 3, channels).to(dtype), normal(slots, heads[1], size, size))
    return NetCase(normal(n, channels).to(dtype), gates.to(dtype)[:, : values + 2 * heads[1]], weights, held)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_one_call_equals_its_ops(kind: str, dtype: torch.dtype) -> None:
    table, counts, begins = kernel_kinds.table(kind), [1, 3, 64, 66, 1], [2, 4]
    for heads, size in (((1, 3), 16), ((2, 4), 128)):
        case = net_case(sum(counts), heads, size, dtype)
        case.held.conv[[0, 3, 5]], case.held.state[[0, 3, 5]] = NAN, NAN  # type: ignore[index]
        other, (rows, attn) = case.copied(), rows_of(counts, begins=begins)
        found = recurrent_kernels.delta_net(*case, rows, attn, table)
        wanted = other.computed_apart(rows, attn)
        assert found is not None and found.dtype == dtype
        assert off(found, wanted) < (2e-5 if dtype == torch.float32 else 2e-2)
        assert torch.equal(case.held.conv[1:6], other.held.conv[1:6])
        assert off(case.held.state[1:6], other.held.state[1:6]) < (3e-6 if dtype == torch.float32 else 2e-2)  # type: ignore[index]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_one_call_has_the_same_bits_in_other_launches(kind: str, dtype: torch.dtype) -> None:
    """Cut at a multiple of 64, with one token behind it, beside other rows, and by other numbers of threads."""
    table, case = kernel_kinds.table(kind), net_case(129 + 40, (2, 4), 16, dtype)
    found = []
    for count in (1, 2, 3):
        with kernel_kinds.threads(count):
            own = case.copied()
            out = recurrent_kernels.delta_net(*own, *rows_of([129, 40], begins=[0, 1]), table)
            assert out is not None
            found.append((out[:129], own.held))
    parts, own = [], case.copied()
    for start, stop in ((0, 64), (64, 128), (128, 129)):
        out = recurrent_kernels.delta_net(
            *own.tokens(slice(start, stop)), *rows_of([stop - start], begins=() if start else [0]), table
        )
        assert out is not None
        parts.append(out)
    found.append((torch.cat(parts), own.held))
    first, held = found[0]
    assert held.state is not None
    for out, kept in found[1:]:
        assert kept.state is not None and torch.equal(out, first)
        assert torch.equal(kept.state[1], held.state[1]) and torch.equal(kept.conv[1], held.conv[1])


def test_padding_and_half_precision_are_left_to_separate_ops() -> None:
    table = kernel_kinds.table(kernel_kinds.OWN[0])
    case = net_case(5, (1, 2), 16, torch.float32)
    assert recurrent_kernels.delta_net(*case, *rows_of([4], padding=1), table) is None
    half = net_case(5, (1, 2), 16, torch.float16)
    before = half.copied()
    assert recurrent_kernels.delta_net(*half, *rows_of([5]), table) is None
    assert torch.equal(half.held.conv, before.held.conv)
