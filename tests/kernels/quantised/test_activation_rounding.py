"""Activations rounded within a norm or SiLU have the bits of those rounded by a launch of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import layers
from tests.kernels.quantised.block_product_library import BlockProducts
from tests.kernels.quantised.test_block_products import DTYPE, library
from tests.oracles import interpreter
from trencadis.backends.cuda.kernels import activation, block_scaled_linear, norms
from trencadis.backends.cuda.kernels.activation_rounding import RoundedRows, Rounding, round_to
from trencadis.backends.cuda.kernels.layers.skinny_gemm import NormOf
from trencadis.backends.cuda.ops import CudaOps
from trencadis.backends.cuda.weights.quantised_weight import (
    E4M3,
    INT8,
    SHIFTED,
    QuantisedWeight,
    round_activations,
    round_groups,
)
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

F8 = torch.float8_e4m3fn
HOW = {
    "int8": Rounding(INT8, torch.int8), "fp8": Rounding(E4M3, F8), "fp8 as values": Rounding(E4M3, DTYPE),
    "groups": Rounding(E4M3, F8, 128), "groups as values": Rounding(E4M3, DTYPE, 128, values=True),
}  # fmt: skip


def rows(count: int, width: int, seed: int = 1) -> Tensor:
    """Rows of which one is zeros, and one's groups differ by their sizes."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    x[0], x[1, : width // 2] = 0, x[1, : width // 2] * 100
    return x.to(DTYPE)


def assert_same(got: RoundedRows, want: RoundedRows) -> None:
    assert got.shape == want.shape and got.codes.dtype == want.codes.dtype
    assert torch.equal(got.codes.view(torch.int8), want.codes.view(torch.int8)), "codes, bit for bit"
    assert want.rounding.values or torch.equal(got.scale, want.scale), "scales, bit for bit"


@pytest.mark.parametrize("width", [384, pytest.param(8320, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", HOW)
def test_rounding_within_a_norm_is_that_behind_it(name: str, width: int, device: torch.device) -> None:
    """With and without a residual, whose sum is stored as the norm stores it."""
    x, residual, weight = (t.to(device) for t in (rows(5, width), rows(5, width, 2), rows(3, width, 3)[2]))
    for added in (residual, None):
        totals, normed = [torch.empty_like(x) for _ in range(2)], torch.empty_like(x)
        norms.rms_norm(x, added, weight, 1e-6, totals[0], normed)
        want = round_to(normed, HOW[name])
        got = round_to(x, HOW[name], NormOf(weight, 1e-6, added, None if added is None else totals[1]))
        assert_same(got, want)
        assert added is None or torch.equal(totals[1].view(torch.int16), totals[0].view(torch.int16))


@pytest.mark.parametrize("width", [384, pytest.param(8320, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", HOW)
def test_rounding_within_silu_is_that_behind_it(name: str, width: int, device: torch.device) -> None:
    gate_up = rows(5, 2 * width).to(device)
    inner = gate_up.new_empty(5, width)
    activation.silu_mul(gate_up, inner)
    assert_same(round_to(gate_up, HOW[name], gate=True), round_to(inner, HOW[name]))


def test_codes_are_those_of_plain_torch(device: torch.device) -> None:
    """Tokens' scales of float8 are over ``SHIFTED``; groups' lie group by group, in rows filled up to four."""
    x = rows(5, 384)
    made = {name: round_to(x.to(device), how) for name, how in HOW.items()}
    codes, scale = round_activations(x, E4M3)
    assert torch.equal(made["fp8"].codes.float().cpu(), codes)
    assert torch.equal(made["fp8"].scale.cpu() * SHIFTED, scale[:, 0]) and made["fp8"].shape == (5, 384)
    groups = made["groups"]
    assert groups.codes.shape == (8, 384) and groups.scale.shape == (3, 8) and groups.shape == (5, 384)
    values = groups.codes.float() * groups.scale.t().repeat_interleave(128, 1)
    assert torch.equal(values[:5].cpu(), round_groups(x)) and not values[5:].any()
    assert torch.equal(made["groups as values"].codes.cpu(), round_groups(x).to(DTYPE))


def test_a_value_that_is_not_finite_spoils_its_row_alone(device: torch.device) -> None:
    """Of groups, its group alone; the next ones have the right codes."""
    x = rows(3, 384)
    x[1, 5], x[2, 200] = torch.inf, torch.nan
    for name in ("fp8", "groups"):
        found = round_to(x.to(device), HOW[name]).scale.cpu()
        spoiled = ~found.isfinite()
        assert spoiled.tolist() == ([False, True, True] if name == "fp8" else [
            [False, True, False, False], [False, False, True, False], [False, False, False, False],
        ])  # fmt: skip
    values = round_to(x.to(device), HOW["groups as values"]).codes.cpu()
    assert not values[1, :128].isfinite().any() and values[1, 128:].isfinite().all()


SHAPE = layers.LayerShape(256, 128, 2, 1, 64)
LAYERS = {
    "fp8": Scheme(8, "float", activations="token"), "int8": Scheme(8, activations="token"),
    "fp8 in blocks": block_scaled_linear.SCHEME,
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_many_rows_has_three_launches_less(
    name: str, library: BlockProducts, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the bits of the layer op by op, the stream and the cache."""
    count = 66 if name == "fp8 in blocks" else 18
    monkeypatch.setattr(torch, "_scaled_mm", scaled_rows)
    run = layers.LayerRun(SHAPE, (3,) * count, DTYPE, device, LAYERS[name])
    ops = CudaOps()
    layer = run.layer(ops)
    weight = layer.attention.qkv.weights[0]
    assert isinstance(weight, QuantisedWeight) and (weight.rounds or weight.blocks is not None)
    found = []
    for fused in (True, False):
        if not fused:
            ops._arrived = None  # what turns fused layers off
        run.reset()
        before = interpreter.launches()
        out = ops.layer(layer, run.x, run.residual, run.rotary, run.attn)
        found.append((interpreter.launches() - before, *out, run.cache.k.clone()))
    (less, *mine), (more, *theirs) = found
    assert more - less == 3, "two norms and SiLU"
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def scaled_rows(
    a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """``torch._scaled_mm`` with scales of rows, in plain torch."""
    assert use_fast_accum and scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
    y = (a.float() * scale_a) @ (b.float() * scale_b)
    return (y if bias is None else y + bias.float()).to(out_dtype)


__all__ = ["library"]
