"""Products of quantised weights on the CPU: near the reference, the same bits in any company."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from tests.quant.checkpoints import made, tensors
from tests.quant.test_formats import GRID, read, seen
from trencadis.backends.cpu import int8_linear as cpu
from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.int8_linear import IntegerWeight
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KINDS, TORCH, VARIABLE, available_kinds
from trencadis.backends.cpu.native.kernel_library import load_library
from trencadis.backends.cpu.native.quantised_weight_panels import PanelWeight
from trencadis.backends.cpu.ops import CpuOps, PackedWeight
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.errors import StartupError
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="this torch has no fbgemm")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def away(y: Tensor, want: Tensor) -> float:
    """Largest error of a row, as a share of its norm."""
    return float(((y.float() - want).norm(dim=1) / want.norm(dim=1)).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bits", "group", "symmetric", "ordered"), GRID)
def test_products_of_every_scheme(
    kind: str, bits: int, group: int, symmetric: bool, ordered: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The reference within rounding, the CPU within 2 % of a row's norm, in shares of 1, 2 and 4 ranks."""
    m = made(normal(32, 384, seed=bits + group), bits, group, symmetric, ordered)
    scheme = Scheme(bits, group=group, symmetric=symmetric, ordered=ordered)
    whole = read(seen(kind), tensors(kind, "w", m), (32, 384), scheme)
    q = QTensor(whole.scheme, whole.data, whole.scale, whole.zero, whole.group, whole.order, dtype)
    bias = normal(32, seed=1).to(dtype)
    x = normal(9, 384, seed=2).to(dtype)
    want = x.float() @ m.values().t()
    slow = ReferenceOps()
    got = slow.linear(x, slow.pack_quantised(q, bias)).float()
    biased = want + bias.float()
    assert (got - biased).abs().max() <= (1e-4 if dtype == torch.float32 else 1e-2) * biased.abs().max()
    for kernels, world in ((k, world) for k in (TORCH, *OWN) for world in (1, 2, 4)):
        monkeypatch.setenv(VARIABLE, kernels)
        each = 384 // world
        total = torch.zeros(9, 32)
        for rank in range(world):
            part = slice(rank * each, (rank + 1) * each)
            packed = CpuOps().pack_quantised(q.inputs(part.start, part.stop), None)
            assert isinstance(packed, IntegerWeight if kernels == TORCH else PanelWeight)
            total += CpuOps().linear(x[:, part].contiguous(), packed).float()
        library = "7 bits" if kernels == TORCH and cpu.has_narrow_sums() else kernels
        assert away(total, want) <= (4e-2 if narrow(library, scheme) else 2e-2)


OWN = available_kinds()
"""Own kernels that this CPU can run."""


@pytest.fixture(params=["onednn", "fbgemm", "7 bits", *OWN])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies: torch's for CPUs with VNNI, its stand-in, that for older CPUs, and own kernels by name."""
    if request.param in KINDS:
        if request.param not in OWN:
            pytest.skip(f"own kernels: {load_library().why or 'not of this CPU'}")
        monkeypatch.setenv(VARIABLE, request.param)
        return str(request.param)
    monkeypatch.setenv(VARIABLE, TORCH)
    if request.param == "7 bits":
        monkeypatch.setattr(cpu, "has_narrow_sums", lambda: True)
    elif cpu.has_narrow_sums():
        pytest.skip("this CPU adds products in 16 bits")
    elif request.param == "fbgemm":
        monkeypatch.setattr(cpu, "is_onednn_exact", lambda: False)
    elif not cpu.is_onednn_exact():
        pytest.skip("this torch has no oneDNN that multiplies integers")
    return str(request.param)


def narrow(library: str, scheme: Scheme) -> bool:
    """Whether activations have 7 bits."""
    return library == "7 bits" or (library in ("avx2", "avx512") and scheme.bits == 8)


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, group=32)])
def test_a_row_has_the_same_bits_in_any_company(scheme: Scheme, library: str) -> None:
    """Beside rows 50 times larger, of zeros, and that are not finite; in numbers of rows that are cut and filled up."""
    packed: Any = CpuOps().pack_quantised(quantise(normal(96, 64), scheme, torch.float32), normal(96, seed=3))
    if library not in KINDS:
        assert (packed.scale is not None) == (library == "onednn")
    x = normal(150, 64, seed=4)
    x[3] *= 50
    x[5] = 0
    x[7, 1], x[8, 2] = float("nan"), float("inf")
    y = CpuOps().linear(x, packed)
    for count in (1, 2, 5, 24, 37):
        for i in range(0, 24, count):
            alone = CpuOps().linear(x[i : i + count], packed)
            assert torch.equal(alone.nan_to_num(), y[i : i + count].nan_to_num()), (i, count)
    assert y.isfinite().all(dim=1).logical_not().nonzero()[:, 0].tolist() == [7, 8]
    assert torch.equal(y[5], packed.bias)
    few = [i for i in range(150) if i not in (5, 7, 8)]
    want = x[few] @ quantise(normal(96, 64), scheme, torch.float32).dequantised().t()
    assert away(y[few] - packed.bias, want) <= (4e-2 if narrow(library, scheme) else 2e-2)
    assert CpuOps().linear(x[:0], packed).shape == (0, 96)


def test_sums_of_the_largest_integers(library: str) -> None:
    """Every code and every activation at its end: sums of 16 bits would saturate."""
    packed: Any = CpuOps().pack_quantised(quantise(torch.full((16, 512), 1.27), Scheme(8), torch.float32))
    assert library in KINDS or packed.narrow == (library == "7 bits")
    y = CpuOps().linear(torch.full((3, 512), 2.0), packed)
    assert (y - 512 * 1.27 * 2).abs().max() <= 0.01 * 512 * 1.27 * 2


@pytest.mark.parametrize("fault", ["saturates", "is missing"])
def test_a_library_that_multiplies_integers_wrongly_is_left_alone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest integers are tried once, before the first weight is packed."""

    def wrong(codes: Tensor, packed: Any, scale: Tensor | None) -> Tensor:
        if fault == "is missing":
            raise RuntimeError("could not create a primitive")
        return torch.full((2, 16), 64 / 2 * 32767 - 64 * 127 * 128)

    monkeypatch.setenv(VARIABLE, TORCH)
    monkeypatch.setattr(cpu, "_by_onednn", wrong)
    monkeypatch.setattr(cpu, "is_onednn_exact", cpu.is_onednn_exact.__wrapped__)
    assert not cpu.is_onednn_exact()
    packed: Any = CpuOps().pack_quantised(quantise(normal(32, 64), Scheme(8), torch.float32))
    assert packed.scale is None
    x = normal(3, 64, seed=5)
    want = x @ quantise(normal(32, 64), Scheme(8), torch.float32).dequantised().t()
    assert away(CpuOps().linear(x, packed), want) <= 4e-2


def test_rows_whose_groups_lie_far_apart_keep_their_type(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, TORCH)  # own kernels keep groups
    weight = normal(64, 512)
    weight[:, :32] *= 300
    q = quantise(weight, Scheme(4, group=32), torch.float32)
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        packed = CpuOps().pack_quantised(q)
    assert isinstance(packed, PackedWeight) and "a matrix of 64 x 512 keeps float32" in caplog.text
    x = normal(4, 512, seed=5)
    assert away(CpuOps().linear(x, packed), x @ q.dequantised().t()) <= 1e-4


def test_slabs_of_a_large_matrix_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q = quantise(normal(50, 64), Scheme(4, group=32), torch.bfloat16)
    want = q.dequantised().bfloat16()
    for module in ("quantised_tensor", "online_quant"):
        monkeypatch.setattr(f"trencadis.core.quant.{module}.SLAB", 64 * 7)
    assert torch.equal(q.values(), want)
    again = quantise(normal(50, 64), Scheme(4, group=32), torch.bfloat16)
    assert torch.equal(again.data, q.data) and torch.equal(again.scale, q.scale)


def test_floats_of_8_bits_become_the_engines_type() -> None:
    q = quantise(normal(24, 32), Scheme(8, "float"), torch.float32)
    packed = CpuOps().pack_quantised(q)
    assert isinstance(packed, PackedWeight)
    x = normal(4, 32, seed=5)
    torch.testing.assert_close(CpuOps().linear(x, packed), x @ q.dequantised().t(), atol=1e-4, rtol=1e-4)


def test_codes_of_one_scale_a_row_are_not_rounded_again() -> None:
    """What the file holds is what is multiplied: with activations that 8 bits hold, the result is exact."""
    m = made(normal(32, 64), 8, 0, False, False)
    q = read("compressed-tensors", tensors("int-quantized", "w", m), (32, 64), Scheme(8, symmetric=False))
    x = torch.zeros(2, 64)
    x[0, 3], x[1, 5] = 1.0, -1.0
    y = CpuOps().linear(x, CpuOps().pack_quantised(q))
    torch.testing.assert_close(y[0], m.values()[:, 3], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kernels", ["auto", TORCH])
def test_no_memory_is_kept_for_numbers_of_rows(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's kernels of one weight would take 70 MB here; what the heap keeps in gaps is given back first."""
    monkeypatch.setenv(VARIABLE, kernels)
    trim: Any = ctypes.CDLL(None).malloc_trim
    packed = CpuOps().pack_quantised(quantise(normal(608, 512), Scheme(8), torch.float32))
    process = psutil.Process()
    CpuOps().linear(normal(128, 512), packed)
    trim(0)
    before = process.memory_info().rss
    for rows in range(1, 128):
        CpuOps().linear(normal(rows, 512), packed)
    trim(0)
    assert process.memory_info().rss - before < 16 << 20


def test_batch_invariance_refuses_products_that_look_at_their_neighbours() -> None:
    class Neighbourly(InvariantOps):
        def linear(self, x: Tensor, w: Any) -> Tensor:
            y = super().linear(x, w)
            return y * (1 + 1e-6 * (len(x) % 64 != 0)) if isinstance(w, IntegerWeight | PanelWeight) else y

    q = quantise(normal(64, 48), Scheme(8), torch.float32)
    InvariantOps().pack_quantised(q)
    with pytest.raises(StartupError, match="--batch-invariant: on this device"):
        Neighbourly().pack_quantised(q)


@pytest.mark.parametrize(("bits", "least"), [(8, 0.0085), (4, 0.105)])
def test_rounding_as_weights_load_is_near_the_best(bits: int, least: float) -> None:
    """Error of normal values as a share of their norm: 8 bits a row, 4 bits a group of 32; zeros stay zeros."""
    weight = normal(64, 896)
    weight[3] = 0
    q = quantise(weight, Scheme(bits, group=32 if bits == 4 else 0), torch.float32)
    assert float((q.dequantised() - weight).norm() / weight.norm()) <= least
    assert not q.dequantised()[3].any() and bool(torch.isfinite(q.scale).all())
