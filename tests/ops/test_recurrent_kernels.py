"""The library's kernels of the recurrent ops are held to float64 and to the reference, by each kind of kernels."""

from __future__ import annotations

import pytest
import torch

from tests import kernel_kinds
from tests.random_recurrent import NAN, delta_case, exact_rule, exact_scan, off, rows_of, seeded
from trencadis.backends.cpu.native import recurrent
from trencadis.backends.cpu.native.kernel_table import TORCH
from trencadis.backends.cpu.reference_ops import ReferenceOps

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
            found = recurrent.delta_rule(*case, rows, attn, table, plain)
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
    found = recurrent.delta_rule(*case, *rows_of([400]), kernel_kinds.table(kind))
    assert found is not None and off(found, wanted) < 1e-5 and off(case.state[1], state) < 1e-5


@KINDS
@TYPES
def test_bits_depend_neither_on_threads_nor_on_other_rows_nor_on_cuts(kind: str, dtype: torch.dtype) -> None:
    table, counts = kernel_kinds.table(kind), [200, 1, 66, 1, 30]
    case, made = delta_case(sum(counts), slots=7, dtype=dtype), []
    for count in (1, 2, 3, 8):
        with kernel_kinds.threads(count):
            own = case.copied()
            out = recurrent.delta_rule(*own, *rows_of(counts, begins=[4]), table)
            assert out is not None
            made.append((out, own.state))
    assert all(torch.equal(out, made[0][0]) and torch.equal(state, made[0][1]) for out, state in made)
    alone, start = case.copied(), 0
    for row, count in enumerate(counts):
        for at in range(0, count, 64):
            part = slice(start + at, start + min(at + 64, count))
            begins = [0] if row == 4 and not at else []
            out = recurrent.delta_rule(
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
                found = recurrent.causal_conv(x, weight, bias, own, rows, attn, activation, table)
            wanted = ReferenceOps().causal_conv(x, weight, bias, others, rows, attn, activation)
            assert found is not None and off(found, wanted) < BOUND[dtype], (channels, taps)
            assert torch.equal(own[1:], others[1:]) and not found[-4:].any()
            with kernel_kinds.threads(8):
                again = recurrent.causal_conv(x, weight, bias, state.clone(), rows, attn, activation, table)
            assert again is not None and torch.equal(again, found)


def test_what_the_library_does_not_compute_torch_does() -> None:
    rows, table = rows_of([4]), kernel_kinds.table(TORCH)
    x, weight, state = torch.randn(4, 6), torch.randn(6, 4), torch.randn(2, 3, 6)
    assert recurrent.causal_conv(x, weight, None, state, *rows, "silu", table) is None
    assert recurrent.delta_rule(*delta_case(4), *rows, table) is None
    for kind in kernel_kinds.OWN:
        table = kernel_kinds.table(kind)
        assert recurrent.delta_rule(*delta_case(4, size=24), *rows, table) is None
        assert recurrent.causal_conv(x, weight, None, state, *rows, "relu", table) is None
        assert recurrent.causal_conv(x, torch.randn(6, 9), None, torch.randn(2, 8, 6), *rows, "", table) is None
        assert recurrent.causal_conv(x, weight, None, state.bfloat16(), *rows, "", table) is None
