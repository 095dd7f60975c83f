"""The recurrent ops equal transformers' functions and a float64 loop, whatever the rows, the chunks and the padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.random_recurrent import NAN, DeltaCase, delta_case, exact_rule, exact_scan, off, rows_of, seeded
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.device.backend import Attn
from trencadis.core.device.launch_tensors import RecurrentRows

OPS = pytest.mark.parametrize("make", [ReferenceOps, CpuOps])


def ran(ops: ReferenceOps, case: DeltaCase, rows: RecurrentRows, attn: Attn) -> Tensor:
    """Runs the delta rule as a launch does; changes the state of ``case``."""
    out = ops.delta_rule(*case, ops.prepare_recurrent(rows, attn), attn)
    assert out.dtype == case.v.dtype and out.shape == case.v.shape and torch.isfinite(out.float()).all()
    return out


@OPS
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("begins", [False, True])
def test_delta_rule_equals_transformers(make: type[ReferenceOps], n: int, begins: bool) -> None:
    theirs = pytest.importorskip(
        "transformers.models.qwen3_5.modeling_qwen3_5", reason="this transformers has no Qwen3.5"
    )
    case = delta_case(n)
    rule = theirs.torch_recurrent_gated_delta_rule if n == 1 else theirs.torch_chunk_gated_delta_rule
    wanted, state = rule(
        *(t[None] for t in case[:3]), g=case.g[None], beta=case.beta[None], output_final_state=True,
        initial_state=None if begins else case.state[2:3], use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    found = ran(make(), case, *rows_of([n], [2], begins=[0] if begins else ()))
    assert off(found, wanted[0]) < 3e-6 and off(case.state[2], state[0]) < 3e-6


@OPS
@pytest.mark.parametrize("alike", [0.0, 0.9, 0.999])
def test_delta_rule_equals_float64(make: type[ReferenceOps], alike: float) -> None:
    """Also for nearly equal keys, as blank images have them: there a product of powers would fail by 4e9."""
    case = delta_case(330, heads=(1, 2), alike=alike)
    wanted, state = exact_rule(case, case.state[1])
    found = ran(make(), case, *rows_of([330]))
    assert off(found, wanted) < 1e-5 and off(case.state[1], state) < 1e-5


@OPS
@pytest.mark.parametrize("cuts", [(64,), (128,), (64, 64, 64, 64), (64, 128)])
def test_cuts_at_multiples_of_64_give_the_same_bits(make: type[ReferenceOps], cuts: tuple[int, ...]) -> None:
    for n in (sum(cuts) + 1, sum(cuts) + 44, sum(cuts) + 64):
        case, ops = delta_case(n), make()
        other = case.copied()
        whole = ran(ops, case, *rows_of([n], begins=[0]))
        parts, start = [], 0
        for count in (*cuts, n - sum(cuts)):
            begins = () if start else (0,)
            parts.append(ran(ops, other.tokens(slice(start, start + count)), *rows_of([count], begins=begins)))
            start += count
        assert torch.equal(torch.cat(parts), whole) and torch.equal(other.state, case.state)


@OPS
def test_a_row_has_the_same_bits_with_any_other_rows_and_padding(make: type[ReferenceOps]) -> None:
    """Ragged rows in one launch, states in any order, NaN in padding and in the slots of rows that begin."""
    counts, slots, begins = [1, 70, 1, 130, 2, 1, 64], [5, 1, 7, 3, 2, 9, 4], [1, 2]
    case = delta_case(sum(counts) + 9, slots=10)
    case.state[[0, 1, 7]] = NAN
    for t in case[:5]:
        t[sum(counts) :] = NAN
    alone, ops, start = case.copied(), make(), 0
    out = ran(ops, case, *rows_of(counts, slots, begins, padding=9, padding_rows=3))
    for row, (count, slot) in enumerate(zip(counts, slots, strict=True)):
        part = slice(start, start + count)
        found = ran(ops, alone.tokens(part), *rows_of([count], [slot], [0] if row in begins else ()))
        assert torch.equal(found, out[part]), row
        assert torch.equal(alone.state[slot], case.state[slot]), row
        start += count
    assert torch.equal(alone.state[[6, 8]], case.state[[6, 8]])


@OPS
@pytest.mark.parametrize("count", [1, 3, 80])
def test_a_source_is_read_and_kept(make: type[ReferenceOps], count: int) -> None:
    case, ops = delta_case(2 * count), make()
    other, before = case.copied(), case.state.clone()
    forked = ran(ops, case, *rows_of([count, count], [1, 2], sources=[3, 3]))
    assert torch.equal(case.state[3], before[3])
    other.state[1:3] = before[3]
    assert torch.equal(ran(ops, other, *rows_of([count, count], [1, 2])), forked)
    assert torch.equal(other.state[1:3], case.state[1:3])
    inputs, weight = torch.randn(2 * count, 6), torch.randn(6, 4)
    states = torch.randn(4, 3, 6)
    expected = states.clone()
    expected[1:3] = states[3]
    rows, attn = rows_of([count, count], [1, 2], sources=[3, 3])
    y = ops.causal_conv(inputs, weight, None, states, ops.prepare_recurrent(rows, attn), attn, "")
    rows, attn = rows_of([count, count], [1, 2])
    wanted = ops.causal_conv(inputs, weight, None, expected, ops.prepare_recurrent(rows, attn), attn, "")
    assert torch.equal(y, wanted) and torch.equal(states[:3], expected[:3])


@OPS
def test_tokens_with_beta_0_change_nothing(make: type[ReferenceOps]) -> None:
    case = delta_case(40)
    case.beta[20:], case.g[20:] = 0.0, 0.0
    other, ops = case.copied(), make()
    ran(ops, case, *rows_of([40]))
    ran(ops, other.tokens(slice(20)), *rows_of([20]))
    assert torch.equal(case.state, other.state)


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule_of_16_bits_rounds_once(make: type[ReferenceOps], dtype: torch.dtype) -> None:
    case = delta_case(100, dtype=dtype)
    wide = DeltaCase(*(t.float() for t in case))
    wanted = ran(ReferenceOps(), wide.copied(), *rows_of([99, 1]))
    assert off(ran(make(), case, *rows_of([99, 1])), wanted) < (3e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.long
@OPS
def test_20000_steps_stay_near_float64(make: type[ReferenceOps]) -> None:
    case = delta_case(20000, heads=(1, 1), size=64)
    wanted, state = exact_rule(case, case.state[1])
    ops = make()
    found = [ran(ops, case.tokens(slice(i, i + 1)), *rows_of([1])) for i in range(20000)]
    assert off(torch.cat(found), wanted) < 1e-4 and off(case.state[1], state) < 1e-4


# The state space


def scanned(ops: ReferenceOps, case: DeltaCase, rows: RecurrentRows, attn: Attn) -> Tensor:
    """Runs the state space as a launch does; changes the state of ``case``."""
    out = ops.state_space(*case, ops.prepare_recurrent(rows, attn), attn)
    assert out.dtype == case.v.dtype and out.shape == case.v.shape and torch.isfinite(out.float()).all()
    return out


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_space_equals_float64(make: type[ReferenceOps], dtype: torch.dtype) -> None:
    """Ragged rows in one launch, NaN in padding and in the slots of rows that begin; other slots keep their bits."""
    counts, slots, begins = [1, 70, 1, 130, 2, 65], [5, 1, 7, 3, 2, 9], [1, 2]
    for heads, size in (((1, 3), 16), ((2, 4), 128), ((1, 2), 24)):
        case = delta_case(sum(counts) + 9, heads, size, slots=10, dtype=dtype)
        case.state[[0, 1, 7]], before, start = NAN, case.state.clone(), 0
        for t in case[:5]:
            t[sum(counts) :] = NAN
        found = scanned(make(), case, *rows_of(counts, slots, begins, padding=9, padding_rows=3))
        for row, (count, slot) in enumerate(zip(counts, slots, strict=True)):
            part = slice(start, start + count)
            held = torch.zeros_like(before[0]) if row in begins else before[slot]
            wanted, state = exact_scan(case.tokens(part), held)
            assert off(found[part], wanted) < (3e-6 if dtype == torch.float32 else 4e-3), (row, size)
            assert off(case.state[slot], state) < 3e-6, (row, size)
            start += count
        assert torch.equal(case.state[[4, 6, 8]], before[[4, 6, 8]])


@OPS
def test_state_space_equals_transformers(make: type[ReferenceOps]) -> None:
    theirs = pytest.importorskip(
        "transformers.models.granitemoehybrid.modeling_granitemoehybrid", reason="this transformers has no Granite 4"
    )
    case, a = delta_case(150, (1, 4), 32), -torch.rand(4) - 0.1
    case = case._replace(g=a * case.beta)
    wanted, state = theirs.mamba2_chunk_scan(
        case.v[None], case.beta[None], a, case.k[None], case.q[None], chunk_size=64, return_final_states=True,
        initial_states=case.state[1:2].transpose(2, 3),
    )  # fmt: skip
    found = scanned(make(), case, *rows_of([150]))
    assert off(found, wanted[0]) < 3e-6 and off(case.state[1], state[0].transpose(1, 2)) < 3e-6


@OPS
def test_cuts_of_the_state_space_at_multiples_of_64_give_the_same_bits(make: type[ReferenceOps]) -> None:
    for cuts, n in (((64,), 65), ((64, 128), 236), ((128,), 192)):
        case, ops, parts, start = delta_case(n), make(), [], 0
        other = case.copied()
        whole = scanned(ops, case, *rows_of([n], begins=[0]))
        for count in (*cuts, n - sum(cuts)):
            rows = rows_of([count], begins=() if start else (0,))
            parts.append(scanned(ops, other.tokens(slice(start, start + count)), *rows))
            start += count
        assert torch.equal(torch.cat(parts), whole) and torch.equal(other.state, case.state)


# The convolution


def conv_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str) -> Tensor:
    """Computes the convolution of one row in float64; ``state``: its last inputs before the row."""
    columns = torch.cat([state, x]).double().t()[None]
    wide = None if bias is None else bias.double()
    made = functional.conv1d(columns, weight.double()[:, None], wide, groups=x.shape[1])[0].t()
    return functional.silu(made) if activation else made


@OPS
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", ""])
def test_causal_conv(make: type[ReferenceOps], taps: int, dtype: torch.dtype, activation: str) -> None:
    counts, slots, begins = [1, 5, 2, 1, 40, 3], [4, 1, 6, 2, 7, 3], [1, 3]
    total, channels, random = sum(counts), 37, seeded(1)
    x = torch.randn(total + 6, channels, generator=random).to(dtype)
    weight = torch.randn(channels, taps, generator=random).to(dtype)
    bias = torch.randn(channels, generator=random).to(dtype) if taps == 3 else None
    state = torch.randn(9, taps - 1, channels, generator=random).to(dtype)
    state[[0, 1, 2]], x[total:] = NAN, NAN
    before, ops = state.clone(), make()
    rows, attn = rows_of(counts, slots, begins, padding=6, padding_rows=2)
    found = ops.causal_conv(x, weight, bias, state, ops.prepare_recurrent(rows, attn), attn, activation)
    assert found.dtype == dtype and torch.isfinite(found.float()).all()
    start = 0
    for row, (count, slot) in enumerate(zip(counts, slots, strict=True)):
        earlier = torch.zeros_like(before[slot]) if row in begins else before[slot]
        own = x[start : start + count]
        wanted = conv_by_torch(own, weight, bias, earlier, activation)
        assert off(found[start : start + count], wanted) < (1e-6 if dtype == torch.float32 else 4e-3)
        assert torch.equal(state[slot], torch.cat([earlier, own])[-(taps - 1) :])
        start += count
    assert torch.equal(state[[5, 8]], before[[5, 8]])


@OPS
def test_causal_conv_equals_transformers(make: type[ReferenceOps]) -> None:
    theirs = pytest.importorskip(
        "transformers.models.qwen3_5.modeling_qwen3_5", reason="this transformers has no Qwen3.5"
    )
    x, weight, ops, state = torch.randn(50, 24), torch.randn(24, 4), make(), torch.full((3, 3, 24), NAN)
    wanted = theirs.causal_conv1d_fn(x[:40].t()[None], weight, activation="silu")[0].t()
    rows, attn = rows_of([40], [2], begins=[0])
    found = ops.causal_conv(x[:40], weight, None, state, ops.prepare_recurrent(rows, attn), attn, "silu")
    assert off(found, wanted) < 1e-6
    held = x[37:40].t()[None].clone()
    for i in range(40, 50):
        wanted = theirs.causal_conv1d_update(x[i : i + 1].t()[None], held, weight, activation="silu")[0].t()
        rows, attn = rows_of([1], [2])
        found = ops.causal_conv(x[i : i + 1], weight, None, state, ops.prepare_recurrent(rows, attn), attn, "silu")
        assert off(found, wanted) < 1e-6 and torch.equal(state[2], held[0].t())


@OPS
@pytest.mark.parametrize("cut", [1, 2, 7, 64])
def test_chunks_of_the_convolution_give_the_same_bits(make: type[ReferenceOps], cut: int) -> None:
    x, weight, ops = torch.randn(100, 32), torch.randn(32, 4), make()
    state = torch.randn(2, 3, 32)
    other = state.clone()
    rows, attn = rows_of([100])
    whole = ops.causal_conv(x, weight, None, state, ops.prepare_recurrent(rows, attn), attn, "silu")
    parts = []
    for part in x.split(cut):
        rows, attn = rows_of([len(part)])
        parts.append(ops.causal_conv(part, weight, None, other, ops.prepare_recurrent(rows, attn), attn, "silu"))
    assert torch.equal(torch.cat(parts), whole) and torch.equal(other[1], state[1])
