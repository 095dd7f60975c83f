"""A decoder layer of few rows over quantised weights is six launches, too, and equals plain torch on their values;
where activations are rounded it is ten."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import layers
from tests.kernels.quantised.test_quantised import packed
from tests.oracles import interpreter
from trencadis.backends.cuda.kernels import activation_rounding, norms
from trencadis.backends.cuda.kernels.layers import skinny_gemm, skinny_quantised_gemm
from trencadis.backends.cuda.ops import CudaOps
from trencadis.backends.cuda.weights.quantised_weight import E4M3, INT8, LARGEST, QuantisedWeight, dequantise
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

SCHEMES = {
    "int4": Scheme(4, group=128), "int8": Scheme(8), "fp8": Scheme(8, "float", activations="none"),
    "int4 with zeros": Scheme(4, group=32, symmetric=False), "int8, groups of 64": Scheme(8, group=64),
    "int4 by rows": Scheme(4),
}  # fmt: skip
QUICK = ("int4",)
SHAPE = layers.LayerShape(1024, 64, 2, 1, 32)


def runs(name: str, dtype: torch.dtype, device: torch.device, contexts: tuple[int, ...]) -> layers.LayerRun:
    return layers.LayerRun(SHAPE, contexts, dtype, device, SCHEMES[name])


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in SCHEMES])
def test_a_layer_over_codes(name: str, device: torch.device) -> None:
    """Float32: within a few of its own roundings; keys and values are stored in their slots alone."""
    before = interpreter.launches()
    result = layers.check(runs(name, torch.float32, device, (20,)), 0)
    print(f"\n{name}: {result}")
    assert device.type != "cpu" or interpreter.launches() - before == 6
    assert result.error <= 4 and result.mean <= 3 and not (result.elsewhere or result.moved or result.counters)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_in_sixteen_bits(name: str, dtype: torch.dtype, device: torch.device) -> None:
    result = layers.check(runs(name, dtype, device, (40, 0, 17)), 1)
    print(f"\n{name} {dtype}: {result}")
    assert result.error <= 2 and result.mean <= 1.5 and not (result.elsewhere or result.moved or result.counters)


@pytest.mark.parametrize("gate", [False, pytest.param(True, marks=pytest.mark.long)])
def test_bits_do_not_depend_on_who_arrives_last(gate: bool, device: torch.device, interpreted: None) -> None:
    """Columns in two pieces; odd features; a bias."""
    w = packed(quantise(torch.randn(70, 1024), SCHEMES["int4"], torch.float32), torch.randn(70), device)
    x, arrived = torch.randn(3, 1024), skinny_gemm.counters(device)
    norm = skinny_gemm.NormOf(torch.rand(1024), 1e-6)
    y = interpreter.in_all_orders(lambda: skinny_quantised_gemm.product(x, w, arrived, norm, gate), every=False)
    wide = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6) * norm.weight.double()
    want: Any = wide @ dequantise(w).double().t() + w.bias.double()  # type: ignore[union-attr]
    if gate:
        first, second = want.chunk(2, 1)
        want = torch.nn.functional.silu(first) * second
    assert not arrived.any() and float((y - want).abs().max() / want.abs().max()) <= 2e-6


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_tiles_have_eight_rows_or_sixteen(name: str, device: torch.device, interpreted: None) -> None:
    """The smaller ones up to eight rows, whose values are the same as with more; float16 behind a norm, too."""
    w = packed(quantise(torch.randn(70, 256), SCHEMES[name], torch.float16), None, device)
    x, arrived = torch.randn(16, 256).half(), skinny_gemm.counters(device)
    norm = skinny_gemm.NormOf(torch.rand(256).half(), 1e-6)
    tiles = {rows: skinny_quantised_gemm.tile_of(x[:rows], w, True).m for rows in (1, 8, 9, 16)}
    assert tiles == {1: 8, 8: 8, 9: 16, 16: 16}
    many = skinny_quantised_gemm.product(x, w, arrived, norm, gate=True)
    wide = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6)
    first, second = (wide @ (dequantise(w) * norm.weight.float()).t()).chunk(2, 1)
    want = torch.nn.functional.silu(first) * second
    assert float((many.float() - want).abs().max()) <= 2e-3 * float(want.abs().max())
    for rows in (1, 8):
        few = skinny_quantised_gemm.product(x[:rows].contiguous(), w, arrived, norm, gate=True)
        assert torch.equal(few, many[:rows])


ROUNDED = {
    "int8": (Scheme(8, activations="token"), torch.float32, 1e-4),
    "int8 in 16 bits": (Scheme(8, activations="token"), torch.bfloat16, 3e-2),
    "fp8": (Scheme(8, "float", activations="token"), torch.bfloat16, 3e-2),
}


@pytest.mark.parametrize("name", ["int8", "fp8", pytest.param("int8 in 16 bits", marks=pytest.mark.long)])
def test_a_layer_that_rounds_activations_equals_its_ops(name: str, device: torch.device) -> None:
    """Ten launches; op by op the same codes are multiplied, up to roundings between."""
    scheme, dtype, tolerance = ROUNDED[name]
    run = layers.LayerRun(SHAPE, (20, 0, 33), dtype, device, scheme)
    ops = CudaOps()
    layer = run.layer(ops)
    weight = layer.attention.qkv.weights[0]
    assert isinstance(weight, QuantisedWeight) and weight.rounds
    before = interpreter.launches()
    fused, keys = run.call(layer, ops).clone(), run.cache.k.clone()
    assert device.type != "cpu" or interpreter.launches() - before == 10
    assert ops._arrived is not None and not ops._arrived.any()
    run.reset()
    ops._arrived = None
    alone = run.call(layer, ops)
    for mine, other in ((fused, alone), (keys, run.cache.k)):
        assert float((mine.float() - other.float()).abs().max()) <= tolerance * float(other.float().abs().max())


@pytest.mark.parametrize(("kind", "dtype"), [(INT8, torch.float32), (E4M3, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("width", [96, pytest.param(9000, marks=pytest.mark.long)])
def test_rounding_behind_a_norm_is_that_of_two_launches(
    kind: int, dtype: torch.dtype, width: int, device: torch.device
) -> None:
    """With a residual and without a norm; a token of zeros, and one that is not finite."""
    x, residual = (torch.randn(4, width, generator=torch.Generator().manual_seed(1)).to(device, dtype) for _ in "xr")
    x[2], residual[2] = 0, 0
    x[3, 5] = torch.inf
    weight, to = torch.rand(width).to(device, dtype), torch.int8 if kind == INT8 else dtype
    totals, normed = [torch.empty_like(x) for _ in range(2)], torch.empty_like(x)
    norms.rms_norm(x, residual, weight, 1e-6, totals[0], normed)
    for source, norm in ((normed, skinny_gemm.NormOf(weight, 1e-6, residual, totals[1])), (x, None)):
        want, scale = activation_rounding.round_rows(source, to)
        got, mine = activation_rounding.round_few(x, kind, norm)
        assert got.dtype == (torch.float16 if kind == E4M3 else dtype), "exact there, and decoded in fewer instructions"
        assert torch.equal(got[:3].float(), want[:3].float()) and torch.equal(mine[:3], scale[:3])
        assert not mine[3].isfinite() and got[:2].abs().amax() == LARGEST[kind]
    assert torch.equal(totals[1][:3], totals[0][:3])


def test_weights_that_do_not_fit_run_op_by_op(device: torch.device) -> None:
    plain = packed(quantise(torch.randn(32, 64), Scheme(8), torch.float32), None, device)
    assert skinny_quantised_gemm.fits(plain)
    plain.gather = torch.arange(64, dtype=torch.int32)
    assert not skinny_quantised_gemm.fits(plain), "columns in another order"
    assert CudaOps.whole_layers
