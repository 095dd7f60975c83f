"""The elementwise kernels equal the reference in float32, rounded once, in every dtype and order of programs."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import interpreter
from tests.oracles.float_distance import assert_within_last_places
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.ops import CudaOps
from trencadis.core.device.backend import ResetTensors, SamplerState

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
slow = settings(max_examples=6, deadline=None, derandomize=True)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def same_in_all_orders(run: object, every: bool) -> None:
    if INTERPRETED:
        interpreter.in_all_orders(run, every)  # type: ignore[arg-type]


@dtypes
@given(n=st.integers(1, 9), width=st.sampled_from([8, 64, 80, 896, 1176, 3584]), add=st.booleans())
@slow
def test_rms_norm(dtype: torch.dtype, device: torch.device, n: int, width: int, add: bool) -> None:
    x, residual, weight = (normal(n, width, seed=i, dtype=dtype, device=device) * 3 for i in range(3))
    other = residual if add else None
    normed, total = CudaOps().rms_norm(x.clone(), weight[0], 1e-6, other)
    rounded = x + residual if add else x
    assert torch.equal(total, rounded), "the residual stream is a sum with one rounding"
    want, _ = ReferenceOps().rms_norm(rounded.float(), weight[0].float(), 1e-6)
    assert_within_last_places(normed, want)


def test_queries_of_one_token_beside_their_gates_are_normed(device: torch.device) -> None:
    """They are a view with gaps, which those of several tokens are not."""
    x, weight = torch.randn(1, 6, 2, 16, device=device)[:, :, 0].reshape(-1, 16), torch.rand(16, device=device)
    assert not x.is_contiguous()
    found, want = (ops().rms_norm(x, weight, 1e-6)[0] for ops in (CudaOps, ReferenceOps))
    assert (found - want).abs().max() <= 2e-6 * want.abs().max()


@dtypes
@given(n=st.integers(1, 9), heads=st.integers(1, 5), width=st.sampled_from([16, 80, 256]))
@slow
def test_gates(dtype: torch.dtype, device: torch.device, n: int, heads: int, width: int) -> None:
    """Both read their gates from wider rows."""
    x = normal(n, heads, width, dtype=dtype, device=device) * 3
    wide, weight = (
        normal(n, heads, 2, width, seed=1, dtype=dtype, device=device),
        normal(width, device=device).to(dtype),
    )
    gate = wide[:, :, 1]
    got, want = CudaOps().gate_heads(x, gate), x.float() * gate.float().sigmoid()
    assert_within_last_places(got, want)
    rows = normal(n, heads * width + 7, seed=2, dtype=dtype, device=device)[:, 3 : 3 + heads * width]
    got, want = (ops().gated_norm(x, weight, 1e-6, rows) for ops in (CudaOps, ReferenceOps))
    assert got.shape == want.shape == (n, heads * width)
    close(got, want.float(), 2)  # two roundings
    assert not len(CudaOps().gated_norm(x[:0], weight, 1e-6, rows[:0]))


@dtypes
@given(n=st.integers(1, 9), width=st.sampled_from([8, 64, 80, 896, 1176, 3584]), add=st.booleans())
@slow
def test_layer_norm(dtype: torch.dtype, device: torch.device, n: int, width: int, add: bool) -> None:
    x, residual, weight, bias = (normal(n, width, seed=i, dtype=dtype, device=device) * 3 for i in range(4))
    other = residual if add else None
    normed, total = CudaOps().layer_norm(x.clone() + 2, weight[0], bias[0], 1e-5, other)
    rounded = x + 2 + residual if add else x + 2
    assert torch.equal(total, rounded), "the residual stream is a sum with one rounding"
    want, _ = ReferenceOps().layer_norm(rounded.double().float(), weight[0].float(), bias[0].float(), 1e-5)
    close(normed, want)


def close(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    """Within 2e-5 of the largest value, or half a place of a shorter type for each of ``roundings``."""
    error = float((got.float() - want).abs().max() / want.abs().max().clamp(min=1e-6))
    assert error <= roundings * {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[got.dtype]


@dtypes
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"])
@pytest.mark.parametrize("width", [8, 40, 1025])
def test_activations(dtype: torch.dtype, device: torch.device, kind: str, width: int) -> None:
    ops, plain = CudaOps(), ReferenceOps()
    x = normal(3, 2 * width, dtype=dtype, device=device) * 4
    x[0, 0] = -40
    close(ops.act(x, kind), plain.act(x.double(), kind).float())  # float32 cancels in the left tail of a tanh
    close(ops.act_mul(x, kind), plain.act_mul(x.double(), kind).float())


def test_activations_keep_what_is_not_a_number(device: torch.device) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -1e30, 2.0]], device=device)
    for kind in ("gelu_tanh", "quick_gelu", "relu"):
        got = CudaOps().act(x, kind)
        assert got[0].isnan().tolist() == [True, False, False, False] and got[0, 2] == 0, kind


@dtypes
@given(n=st.integers(1, 7), width=st.sampled_from([1, 40, 128, 1025, 3420]))
@slow
def test_silu_mul(dtype: torch.dtype, device: torch.device, n: int, width: int) -> None:
    gate_up = normal(n, 2 * width, dtype=dtype, device=device) * 4
    assert_within_last_places(CudaOps().silu_mul(gate_up), ReferenceOps().silu_mul(gate_up.float()))


@dtypes
@given(slots=st.sampled_from([64, 192]), features=st.sampled_from([1176, 588]), missing=st.sampled_from([0, 8]))
@slow
def test_patches(dtype: torch.dtype, device: torch.device, slots: int, features: int, missing: int) -> None:
    """``missing``: values behind the pixels that widths are filled up to, exact zeros."""
    generator = torch.Generator().manual_seed(slots)
    pixels = torch.randint(0, 256, (slots, features), generator=generator, dtype=torch.uint8).to(device)
    scale = torch.rand(features, generator=generator).to(device) / 64
    shift = normal(features, device=device)
    wide_scale, wide_shift = (torch.cat([t, t.new_zeros(missing)]) for t in (scale, shift))
    whole = CudaOps().patches(pixels, wide_scale, wide_shift, dtype)
    assert whole.shape == (slots, features + missing) and not whole[:, features:].any()
    got = whole[:, :features]
    want = pixels.double() * scale.double() + shift.double()
    # Close to zero the sum cancels: the distance is then one of float32's own roundings.
    far = want.abs() > 1e-2
    assert_within_last_places(got[far], want[far])
    torch.testing.assert_close(got[~far].double(), want[~far], rtol=1e-2, atol=1e-6)


@dtypes
@given(n=st.integers(1, 40), width=st.sampled_from([8, 1100]), seed=st.integers(0, 99))
@slow
def test_embed(dtype: torch.dtype, device: torch.device, n: int, width: int, seed: int) -> None:
    """Id, slot's last token, or arena row; bit for bit."""
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, low: int, rate: float) -> Tensor:
        some = torch.rand(n, generator=generator) < rate
        return torch.where(some, torch.randint(low, high, (n,), generator=generator), 0).int().to(device)

    table, arena = (normal(m, width, seed=m, dtype=dtype, device=device) for m in (50, 9))
    last = torch.randint(0, 50, (7,), generator=generator).int().to(device)
    args = (ints(50, 0, 1.0), ints(7, 1, 0.4), last, ints(9, 2, 0.4), arena, table)
    assert torch.equal(CudaOps().embed(*args), ReferenceOps().embed(*args))


@dtypes
@given(n=st.integers(1, 20), width=st.sampled_from([8, 1030]))
@slow
def test_gather_and_scatter(dtype: torch.dtype, device: torch.device, n: int, width: int) -> None:
    source = normal(33, width, dtype=dtype, device=device)
    rows = torch.randperm(33, generator=torch.Generator().manual_seed(n))[:n].to(device)
    got = CudaOps().gather_rows(source, rows)
    assert torch.equal(got, source[rows])
    target, want = torch.zeros_like(source), torch.zeros_like(source)
    CudaOps().scatter_rows(target, rows, got)
    want[rows] = got
    assert torch.equal(target, want)


@dtypes
@given(n=st.integers(1, 20), width=st.sampled_from([8, 1030]))
@slow
def test_interpolate(dtype: torch.dtype, device: torch.device, n: int, width: int) -> None:
    """The sum is float32's, rounded once."""
    generator = torch.Generator().manual_seed(n)
    table = normal(33, width, dtype=dtype, device=device)
    near = torch.randint(0, 33, (n, 4), dtype=torch.int32, generator=generator).to(device)
    share = torch.rand(n, 4, generator=generator).to(device)
    got, want = (ops.interpolate(table, near, share) for ops in (CudaOps(), ReferenceOps()))
    exact = (table[near.long()].double() * share[..., None].double()).sum(1)
    assert got.dtype == want.dtype == dtype
    for found in (got, want):
        off = (found.double() - exact).abs() / exact.abs().max()
        assert float(off.max()) <= {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


def reset_case(device: torch.device, vocab: int) -> tuple[ResetTensors, SamplerState]:
    """Three slots written, a fourth row for the sink; the state is full of other values."""
    generator = torch.Generator().manual_seed(vocab)

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(0, 200, shape, generator=generator).to(dtype).to(device)

    width = -(-vocab // 8)
    state = SamplerState(
        ints(9), ints(9, vocab), ints(9, width, dtype=torch.uint8), ints(9, 300, dtype=torch.int64),
        normal(9, 300, device=device),
    )  # fmt: skip
    inputs = ResetTensors(
        torch.tensor([7, 2, 5, 0], device=device), ints(4, vocab), ints(4, width, dtype=torch.uint8),
        ints(4, 300, dtype=torch.int64), normal(4, 300, seed=4, device=device),
    )  # fmt: skip
    return inputs, state


@pytest.mark.parametrize("vocab", [61, 512, 9001])
def test_reset(device: torch.device, vocab: int) -> None:
    inputs, state = reset_case(device, vocab)
    want = SamplerState(*(t.clone() for t in state))
    CudaOps().reset(inputs, state)
    ReferenceOps().reset(inputs, want)
    for name, ours, wanted in zip(state._fields, state, want, strict=True):
        assert torch.equal(ours, wanted), name


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["two", "every"])
def test_same_bits_in_every_order(every: bool, device: torch.device) -> None:
    ops = CudaOps()
    x = normal(5, 2100, dtype=torch.bfloat16, device=device)
    factors = normal(2, 40, device=device)
    pixels = torch.arange(64 * 40, device=device).remainder(256).to(torch.uint8).view(64, 40)
    rows = torch.tensor([3, 1, 4], device=device)
    tokens = torch.tensor([0, 3, 2], dtype=torch.int32, device=device)

    def run() -> list[object]:
        inputs, state = reset_case(device, 5000)
        ops.reset(inputs, state)
        target = torch.zeros_like(x)
        ops.scatter_rows(target, rows, x[:3])
        return [
            ops.rms_norm(x, x[0], 1e-6, x), ops.layer_norm(x, x[0], x[1], 1e-6, x), ops.act(x, "gelu"),
            ops.act_mul(x, "relu"), ops.silu_mul(x), target, ops.gather_rows(x, rows), tuple(state),
            ops.patches(pixels, factors[0], factors[1], torch.bfloat16),
            ops.embed(tokens, tokens.clamp_max(2), tokens, tokens - tokens, x, x),
        ]  # fmt: skip

    same_in_all_orders(run, every)
