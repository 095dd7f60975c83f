"""Products with coded weights equal the reference (dequantise, multiply) for every scheme, cut and kind of launch."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import interpreter
from tests.quant.checkpoints import made, tensors
from tests.quant.test_formats import GRID, read, seen
from trencadis.backends.cuda.kernels import quantised_linear as kernels
from trencadis.backends.cuda.kernels import tile_sizes
from trencadis.backends.cuda.ops import CudaOps, InvariantCudaOps
from trencadis.backends.cuda.weights import quantised_weight
from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight
from trencadis.core.errors import StartupError
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import CODES, Scheme, held_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = {16: tile_sizes.Tile(16, 32, 4, 1), 32: tile_sizes.Tile(16, 32, 4, 1)}
"""The interpreter's time is the number of its programs; edges are what small tiles show."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def away(y: Tensor, want: Tensor) -> float:
    """Largest error of a row, as a share of its norm."""
    return float(((y.float().cpu() - want).norm(dim=1) / want.norm(dim=1)).max())


def packed(q: QTensor, bias: Tensor | None, device: torch.device) -> QuantisedWeight:
    found: Any = CudaOps().pack_quantised(q.moved(device), None if bias is None else bias.to(device))
    assert isinstance(found, QuantisedWeight)
    return found


def product(x: Tensor, w: QuantisedWeight, device: torch.device) -> Tensor:
    return CudaOps().linear(x.to(device), w).cpu()


@pytest.mark.parametrize(
    ("kind", "bits", "group", "symmetric", "ordered"),
    [pytest.param(*case, marks=() if i % 4 == 0 else pytest.mark.long) for i, case in enumerate(GRID)],
)
def test_codes_mean_what_the_checkpoint_says(
    kind: str, bits: int, group: int, symmetric: bool, ordered: bool, device: torch.device
) -> None:
    """Whole and in shares of 2 and 4 ranks; a row takes as many bytes as the ledger says."""
    m = made(normal(24, 384, seed=bits + group), bits, group, symmetric, ordered)
    scheme = Scheme(bits, group=group, symmetric=symmetric, ordered=ordered)
    q = replace(read(seen(kind), tensors(kind, "w", m), (24, 384), scheme), dtype=torch.bfloat16)
    for start, stop in ((0, 384), (0, 192), (192, 384), (96, 192)):
        part = q.inputs(start, stop)
        w = packed(part, None, device)
        values = quantised_weight.dequantise(w).cpu()
        if w.gather is not None:
            values = torch.zeros(24, stop - start).index_add_(1, w.gather.cpu().long(), values)
        torch.testing.assert_close(values, part.dequantised(), rtol=2e-3, atol=1e-6)
        assert w.nbytes == held_bytes(scheme, 24, stop - start, 2, CODES, 384), (start, stop)


EVERY = [
    (bits, group, symmetric, rows, dtype)
    for bits, group, symmetric in (
        (4, 32, True),
        (4, 128, False),
        (4, 0, True),
        (8, 64, False),
        (8, 0, True),
        (4, 24, True),
    )
    for rows in (1, 15, 17)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "rows", "dtype"),
    [pytest.param(*case, marks=() if i % 9 == 4 else pytest.mark.long) for i, case in enumerate(EVERY)],
)
def test_products_equal_the_reference(
    bits: int, group: int, symmetric: bool, rows: int, dtype: torch.dtype, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows cut by columns and in tiles; sizes that no tile divides; biases."""
    monkeypatch.setitem(tile_sizes.FORCED, "quantised", SMALL[dtype.itemsize * 8])
    columns = 528
    m = made(normal(40, columns, seed=bits + group), bits, group, symmetric, False)
    scheme = Scheme(bits, group=group, symmetric=symmetric)
    zero = (m.zeros - (1 << (bits - 1))).to(torch.int8)
    codes = (m.codes - (1 << (bits - 1))).to(torch.int8)
    q = QTensor(scheme, codes, m.scales, None if symmetric else zero, group or columns, None, dtype)
    bias, x = normal(40, seed=1).to(dtype), normal(rows, columns, seed=2).to(dtype)
    w = packed(q, bias, device)
    assert not w.rounds
    want = x.float() @ q.dequantised().t() + bias.float()
    error = float((product(x, w, device).float() - want).abs().max() / want.abs().max())
    assert error <= (1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float_of_8_bits_is_decoded_exactly(kind: torch.dtype, device: torch.device) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    codes = bits.view(kind)
    codes = codes[torch.isfinite(codes.float())]
    size = len(codes) // 16 * 16
    q = QTensor(
        Scheme(8, "float", activations="none"), codes[:size].view(1, -1).repeat(16, 1), torch.ones(16, 1), None, size,
        None, torch.bfloat16,
    )  # fmt: skip
    w = packed(q, None, device)
    assert torch.equal(quantised_weight.dequantise(w).cpu(), q.dequantised())
    eye = torch.eye(size)[:20].bfloat16()
    assert torch.equal(product(eye, w, device).float(), q.dequantised().t()[:20])


def test_floats_that_are_not_finite_are_refused(device: torch.device) -> None:
    data = torch.zeros(4, 16).to(torch.float8_e4m3fn)
    data.view(torch.uint8)[1, 3] = 0x7F
    q = QTensor(Scheme(8, "float"), data, torch.ones(4, 1), None, 16, None, torch.bfloat16)
    with pytest.raises(StartupError, match="not finite"):
        packed(q, None, device)


@pytest.mark.parametrize("rows", [3, 20])
def test_integers_of_activations(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to the nearest, one scale a token; a row of zeros is the bias; one that is not finite spoils itself."""
    monkeypatch.setitem(tile_sizes.FORCED, "quantised", SMALL[16])
    q = quantise(normal(40, 520), Scheme(8, activations="token"), torch.bfloat16)
    bias, x = normal(40, seed=1).bfloat16(), normal(rows, 520, seed=2).bfloat16()
    x[1] *= 50
    w = packed(q, bias, device)
    assert w.rounds
    y = product(x, w, device)
    want = x.float() @ q.dequantised().t() + bias.float()
    assert away(y, want) <= 2e-2
    torch.testing.assert_close(y, quantised_weight.product(x.to(device), w).cpu(), rtol=1e-2, atol=1e-2)
    x[0], x[2, 7] = 0, float("nan")
    y = product(x, w, device)
    assert torch.equal(y[0], bias) and not torch.isfinite(y[2]).any() and torch.isfinite(y[1]).all()


@pytest.mark.parametrize("rows", [3, 20])
def test_floats_of_activations(rows: int, device: torch.device) -> None:
    q = quantise(normal(48, 512), Scheme(8, "float", activations="token"), torch.bfloat16)
    bias, x = normal(48, seed=1).bfloat16(), normal(rows, 512, seed=2).bfloat16()
    w = packed(q, bias, device)
    if INTERPRETED or tile_sizes.arch_of(device) >= quantised_weight.ROUNDS_FLOATS:
        assert w.rounds
    y = product(x, w, device)
    torch.testing.assert_close(y, quantised_weight.product(x.to(device), w).cpu(), rtol=2e-2, atol=2e-2)
    assert away(y, x.float() @ q.dequantised().t() + bias.float()) <= 5e-2


@pytest.mark.parametrize(
    "scheme", [Scheme(8, activations="token"), pytest.param(Scheme(4, group=32), marks=pytest.mark.long)]
)
def test_a_row_has_the_same_bits_in_any_company(
    scheme: Scheme, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and among others of one class of launches; under ``--batch-invariant`` in all of them."""
    monkeypatch.setitem(tile_sizes.FORCED, "quantised", SMALL[16])
    w = packed(quantise(normal(33, 512), scheme, torch.bfloat16), None, device)
    x = normal(20, 512, seed=4).bfloat16()
    few = product(x[:15], w, device)
    for i in (0, 3, 14):
        assert torch.equal(product(x[i : i + 1], w, device)[0], few[i])
    many = product(x, w, device)
    assert torch.equal(product(x[2:19], w, device), many[2:19])
    ops = InvariantCudaOps()
    wide = ops.linear(x.to(device), w).cpu()
    assert torch.equal(ops.linear(x[4:5].to(device), w).cpu(), wide[4:5])


def test_no_order_of_programs_changes_a_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRETED:
        pytest.skip("the interpreter chooses the order")
    monkeypatch.setitem(tile_sizes.FORCED, "quantised", SMALL[16])
    w = packed(quantise(normal(40, 512), Scheme(8, activations="token"), torch.bfloat16), None, device)
    x = normal(3, 512, seed=4).bfloat16()
    interpreter.in_all_orders(lambda: kernels.linear(x, w))


def test_the_cut_of_few_rows_follows_from_the_weight_alone() -> None:
    """Enough programs for a card, none with next to nothing to do."""
    for features, steps in ((256, 8), (3584, 56), (37888, 56), (3584, 296), (152064, 56)):
        cut = kernels.pieces(features, steps, 64)
        assert 1 <= cut <= max(steps // kernels.LEAST_STEPS, 1)
        assert cut == 1 or -(-features // 64) * (cut - 1) < kernels.PROGRAMS
