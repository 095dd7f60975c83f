"""Own kernels: which of them serve, what a lack of them says, and layouts that whole panels do not fill."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from tests.quant.test_cpu import away, normal
from trencadis.backends.cpu.int8_linear import IntegerWeight
from trencadis.backends.cpu.native import (
    kernel_choice_by_cpu,
    kernel_library,
    kernel_threads,
    quantised_weight_panels,
    weight_packing,
)
from trencadis.backends.cpu.native.kernel_choice_by_cpu import EMULATED, KINDS, VARIABLE, available_kinds
from trencadis.backends.cpu.native.kernel_library import load_library
from trencadis.backends.cpu.native.quantised_weight_panels import PanelWeight, dequantise
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cpu.shape_policy import policy
from trencadis.core.errors import StartupError
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor, join_weights
from trencadis.core.quant.quantised_weight_layout_and_bytes import FP4_HALVES, PANELS, Scheme, held_bytes

FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx_vnni": {"avx2", "avx_vnni"},
    "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl"},
    "avx512_vnni": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"},
    "amx": {"avx512f", "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"},
}
"""What Linux calls the instructions of each kind."""

own = pytest.mark.skipif(not available_kinds(), reason=f"own kernels: {load_library().why}")


@own
def test_kernels_are_those_that_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/cpuinfo lists its instructions, of which the system may forbid tiles; the last kind serves."""
    monkeypatch.delenv(VARIABLE, raising=False)
    text = Path("/proc/cpuinfo").read_text()
    flags = set(next(line for line in text.splitlines() if line.startswith("flags")).split())
    listed = tuple(kind for kind in KINDS if FLAGS[kind] <= flags)
    assert available_kinds() in (listed, tuple(kind for kind in listed if kind != "amx"))
    assert kernel_choice_by_cpu.chosen_table().kind == available_kinds()[-1]


@pytest.mark.parametrize("fault", ["missing", "broken", "older", "another CPU"])
def test_without_a_library_torch_serves_and_a_line_says_why(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"missing": "not built", "broken": "does not load", "older": "other sources", "another CPU": "no AVX2"}
    if fault == "broken":
        (tmp_path / "_panels.so").write_bytes(b"no library")
    elif fault != "missing":
        if load_library().library is None:
            pytest.skip(load_library().why)
        shutil.copy(load_library().library._name, tmp_path / "_panels.so")
        monkeypatch.setattr(kernel_library, "VERSION", 99) if fault == "older" else None
    have = kernel_library.open_library(tmp_path)
    if fault == "another CPU":
        have = have._replace(features=frozenset(), why="the CPU has no AVX2")
    assert not have.features and said[fault] in have.why
    monkeypatch.setattr(kernel_library, "load_library", lambda: have)
    monkeypatch.delenv(VARIABLE, raising=False)
    for cached in (kernel_library.log_quantised_kernels, kernel_choice_by_cpu._chosen):
        cached.cache_clear()
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        packed = CpuOps().pack_quantised(quantise(normal(32, 64), Scheme(8), torch.float32))
    assert isinstance(packed, IntegerWeight) and policy("").quantised != PANELS
    assert "integers are multiplied by" in caplog.text and said[fault] in caplog.text
    with pytest.raises(StartupError, match=said[fault]):
        monkeypatch.setenv(VARIABLE, "avx2")
        kernel_choice_by_cpu.chosen_table()


def test_a_name_of_no_kernels_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "neon")
    with pytest.raises(
        StartupError, match=f"{VARIABLE}='neon' is none of auto, torch, avx2, avx_vnni, avx512, avx512_vnni, amx"
    ):
        policy("")


@pytest.fixture(params=[pytest.param(kind, marks=own) for kind in (*KINDS, EMULATED)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind that the CPU can run."""
    if request.param not in (*available_kinds(), *kernel_kinds.EMULATIONS):
        pytest.skip("not of this CPU")
    monkeypatch.setenv(VARIABLE, request.param)
    return str(request.param)


SHAPES = ((1, 1), (15, 7), (17, 50), (33, 100), (96, 72), (130, 260))
SCHEMES = (
    Scheme(8), Scheme(4), Scheme(8, symmetric=False), Scheme(4, group=20, symmetric=False), Scheme(4, group=24),
    Scheme(4, group=32), Scheme(8, group=36), Scheme(8, group=128, symmetric=False), Scheme(4, group=64, ordered=True),
)  # fmt: skip


def weight(shape: tuple[int, int], scheme: Scheme, dtype: torch.dtype) -> QTensor:
    """Rounded normal values; zero points and orders as files have them."""
    q = quantise(normal(*shape), scheme, dtype)
    zero, order = None, None
    if not scheme.symmetric:
        span = 7 if scheme.bits == 4 else 100
        zero = (torch.arange(q.scale.numel()).view(q.scale.shape) * 37 % (2 * span) - span).to(torch.int8)
    if scheme.ordered and q.scale.shape[1] > 1:
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(1)).int() // scheme.group
    return QTensor(scheme, q.data, q.scale, zero, q.group, order, dtype)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.label}{'' if s.symmetric else ', zero points'}")
def test_shapes_that_fill_no_panel(scheme: Scheme, kernels: str) -> None:
    """The weight comes back, costs what the ledger counts, and each row's product is near and its own."""
    bar = 5e-2 if kernels in ("avx2", "avx512") and scheme.bits == 8 else 2.5e-2
    for shape, dtype in ((s, d) for s in SHAPES for d in (torch.float32, torch.bfloat16, torch.float16)):
        q = weight(shape, scheme, dtype)
        bias = normal(shape[0], seed=2).to(dtype)
        packed: Any = CpuOps().pack_quantised(q, bias)
        assert isinstance(packed, PanelWeight)
        assert packed.nbytes == held_bytes(scheme, *shape, dtype.itemsize, PANELS, shape[1])
        torch.testing.assert_close(dequantise(packed), q.dequantised(), rtol=1e-3, atol=1e-6)
        x = normal(21, shape[1], seed=3).to(dtype)
        y = CpuOps().linear(x, packed)
        want = x.float() @ q.dequantised().t() + bias.float()
        assert y.dtype == dtype and float((y.float() - want).norm() / want.norm()) <= bar
        for count in (1, 3, 7, 8, 9):
            assert torch.equal(CpuOps().linear(x[2 : 2 + count], packed), y[2 : 2 + count]), (shape, count)


def test_doubled_4_bit_floats_keep_4_bits(kernels: str) -> None:
    """Exact values at the bytes that the ledger counts, also of one group; a row's product is near and its own."""
    values = torch.tensor(FP4_HALVES, dtype=torch.int8)
    for (rows, columns), dtype in (
        (s, d) for s in ((5, 24), (33, 96), (130, 288)) for d in (torch.float32, torch.bfloat16)
    ):
        scheme, generator = Scheme(8, group=32, fp4=True), torch.Generator().manual_seed(columns)
        data = values[torch.randint(0, 16, (rows, columns), generator=generator)]
        scale = torch.exp2(torch.randint(-9, 3, (rows, -(-columns // 32)), generator=generator).float())
        q = QTensor(scheme, data, scale, None, 32, None, dtype)
        for one in (q, q.padded(rows + 3, columns + (40 if columns > 32 else 0))):
            packed: Any = CpuOps().pack_quantised(one)
            assert packed.nbytes == held_bytes(scheme, *one.shape, dtype.itemsize, PANELS, one.shape[1])
            assert torch.equal(dequantise(packed), one.dequantised())
        packed = CpuOps().pack_quantised(q)
        x = normal(21, columns, seed=3).to(dtype)
        y = CpuOps().linear(x, packed)
        assert away(y, x.float() @ q.dequantised().t()) <= 2.5e-2
        for count in (1, 3, 7, 8, 9):
            assert torch.equal(CpuOps().linear(x[2 : 2 + count], packed), y[2 : 2 + count]), count


def test_codes_and_scales_lie_in_huge_pages(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, own = list[Tensor](), weight_packing.pages.take

    def take(size: int) -> Tensor:
        held.append(own(size))
        return held[-1]

    monkeypatch.setattr(weight_packing.pages, "take", take)
    for scheme in (Scheme(8), Scheme(4, group=32)):
        packed: Any = CpuOps().pack_quantised(quantise(normal(40, 96), scheme, torch.float32))
        wanted = [packed.codes] if packed.scale is None else [packed.codes, packed.scale]
        assert {one.data_ptr() for one in wanted} == {one.data_ptr() for one in held}
        held.clear()


def test_scales_of_4_bit_floats_are_exact_however_far_apart(kernels: str) -> None:
    """Beside a row's largest scale, float16 would lose those that are 2 ** 25 times smaller."""
    data = torch.tensor(FP4_HALVES, dtype=torch.int8).repeat(16, 8)
    scale = torch.exp2(torch.tensor([3.0, -30.0, -60.0, -118.0])).repeat(16, 1)
    packed: Any = CpuOps().pack_quantised(
        QTensor(Scheme(8, group=32, fp4=True), data, scale, None, 32, None, torch.float32)
    )
    wanted = data.float() * scale.repeat_interleave(32, 1)
    assert torch.equal(dequantise(packed), wanted)
    for group in range(4):
        x = torch.zeros(3, 128)
        x[:, 32 * group] = 127.0  # rounds to itself
        assert torch.equal(CpuOps().linear(x, packed), x @ wanted.t()), group


def test_4_bit_floats_with_other_scales_than_powers_of_two_are_left_to_torch(kernels: str) -> None:
    places = torch.randint(0, 16, (16, 64), generator=torch.Generator().manual_seed(1))
    data = torch.tensor(FP4_HALVES, dtype=torch.int8)[places]
    q = QTensor(Scheme(8, group=32, fp4=True), data, torch.full((16, 2), 0.3), None, 32, None, torch.float32)
    assert quantised_weight_panels.panel_weight(q, None) is None
    x = normal(5, 64)
    assert away(CpuOps().linear(x, CpuOps().pack_quantised(q)), x @ q.dequantised().t()) <= 2.5e-2


def test_sums_that_16_bits_could_not_hold(kernels: str) -> None:
    """Codes and activations at their ends, of both signs, in every scheme that adds two products at a time."""
    for scheme in (Scheme(8), Scheme(4), Scheme(4, group=32)):
        most = 127 if scheme.bits == 8 else 7
        for sign in (1, -1):
            data = torch.full((16, 256), sign * most, dtype=torch.int8)
            groups = 256 // scheme.group if scheme.group else 1
            q = QTensor(scheme, data, torch.ones(16, groups), None, scheme.group or 256, None, torch.float32)
            y = CpuOps().linear(torch.full((3, 256), 5.0), CpuOps().pack_quantised(q))
            torch.testing.assert_close(y, torch.full((3, 16), 5.0 * sign * most * 256), rtol=1e-5, atol=0)


def test_many_threads_and_many_rows_change_no_bit(kernels: str) -> None:
    """A weight large enough for several threads, and more rows than a call rounds at a time, of a view with gaps."""
    q = quantise(normal(272, 640), Scheme(4, group=128), torch.float32)
    packed: Any = CpuOps().pack_quantised(q)
    x = normal(quantised_weight_panels.ROWS + 5, 700, seed=1)[:, 30:670]
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(CpuOps().linear(x, packed))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(CpuOps().linear(x[-1:], packed), found[0][-1:])
    assert away(found[0][:9], x[:9] @ q.dequantised().t()) <= 2e-2


def test_rows_cut_in_an_order_of_their_own(kernels: str) -> None:
    """Ranks that cut ordered columns anywhere leave groups of all sizes; fused parts share one order."""
    scheme = Scheme(4, group=64, ordered=True)
    q = weight((40, 256), scheme, torch.float32)
    whole = join_weights([q, q])
    x = normal(5, 256, seed=4)
    want = x @ q.dequantised().t()

    def part(a: int, b: int) -> Tensor:
        return CpuOps().linear(x[:, a:b], CpuOps().pack_quantised(q.inputs(a, b)))

    assert away(part(0, 100) + part(100, 256), want) <= 2e-2
    for start, stop in ((0, 100), (100, 256), (64, 128), (0, 128), (5, 6)):  # a share's size is known without its order
        share = q.inputs(start, stop)
        for one in (share, share.padded(40, stop - start + 3)):
            made = CpuOps().pack_quantised(one)
            assert isinstance(made, PanelWeight)
            assert made.nbytes == held_bytes(scheme, 40, one.shape[1], 4, PANELS, 256), (start, stop)
            torch.testing.assert_close(dequantise(made), one.dequantised(), rtol=2e-3, atol=1e-6)
    both = CpuOps().pack_quantised(whole)
    assert isinstance(both, PanelWeight) and both.nbytes == held_bytes(scheme, 80, 256, 4, PANELS, 256)
    assert away(CpuOps().linear(x, both)[:, 40:], want) <= 2e-2


def test_no_second_openmp_runtime_is_loaded() -> None:
    """Kernels have threads of their own, and the runtime that torch is linked with serves torch."""
    maps = Path("/proc/self/maps")
    if not maps.exists() or not available_kinds():
        pytest.skip("no Linux, or no kernels")
    runtimes = lambda: {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line.split()[-1]}  # noqa: E731
    before = runtimes()
    kernel_threads.calls()
    assert len(kernel_threads.openmp()) == 2 and runtimes() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_between_products_are_the_references(dtype: torch.dtype, kernels: str) -> None:
    """Norms and gates in one pass: values of the specification, the same bits alone, and the sum in place."""
    slow, fast = ReferenceOps(), CpuOps()
    for width in (5, 16, 70):
        x, residual, weight = normal(9, width).to(dtype), normal(9, width, seed=1).to(dtype), normal(width).to(dtype)
        for beside in (None, residual):
            want, total = slow.rms_norm(x.clone(), weight, 1e-6, beside)
            own = x.clone()
            normed, held = fast.rms_norm(own, weight, 1e-6, beside)
            assert held is own and torch.equal(held, total)
            torch.testing.assert_close(normed, want, rtol=1.6e-2, atol=1e-5)
            alone = fast.rms_norm(x[4:5].clone(), weight, 1e-6, None if beside is None else beside[4:5])[0]
            assert torch.equal(alone, normed[4:5])
            wide = normal(width, seed=4) + 1  # a weight in float32
            with kernel_kinds.served("rowwise", kernel_kinds.table(kernels)):
                normed = fast.rms_norm(x.clone(), wide, 1e-6, beside)[0]
            torch.testing.assert_close(normed, slow.rms_norm(x.clone(), wide, 1e-6, beside)[0], rtol=8e-3, atol=1e-5)
        gates = normal(9, 2 * width, seed=2).to(dtype) * 4
        gates[3, 1], gates[4, 2], gates[5, 0] = 80, -80, float("nan")
        made, want = fast.silu_mul(gates), slow.silu_mul(gates)
        torch.testing.assert_close(made, want, rtol=1.6e-2, atol=1e-5, equal_nan=True)
        assert torch.equal(fast.silu_mul(gates[4:5]), made[4:5])


def test_gates_of_many_rows_are_those_of_one_thread(kernels: str) -> None:
    gates, before = normal(90, 1400).bfloat16(), torch.get_num_threads()
    one = CpuOps().silu_mul(gates)
    try:
        torch.set_num_threads(3)
        assert torch.equal(CpuOps().silu_mul(gates), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_with_a_gate_are_the_references(dtype: torch.dtype, kernels: str) -> None:
    """The gate is a slice of wider rows; bits depend neither on other tokens nor on threads."""
    for heads, width in ((1, 5), (3, 32)):
        y, weight = normal(9, heads, width).to(dtype), normal(width, seed=1).to(dtype)
        gate = (normal(9, heads * width + 7, seed=2) * 3).to(dtype)[:, : heads * width]
        gate[2, 0], gate[3, 1], gate[4, 2] = 80, -80, float("nan")
        made = CpuOps().gated_norm(y, weight, 1e-6, gate)
        want = ReferenceOps().gated_norm(y, weight, 1e-6, gate)
        torch.testing.assert_close(made, want, rtol=1.6e-2, atol=1e-5, equal_nan=True)
        assert torch.equal(CpuOps().gated_norm(y[5:6], weight, 1e-6, gate[5:6]), made[5:6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_best_of_a_row_is_torchs_argmax(dtype: torch.dtype, kernels: str) -> None:
    """The first of equals, of rows that end within a vector; what is no number counts as the largest."""
    for width in (1, 7, 16, 53, 1000):
        logits = normal(40, width, seed=width).to(dtype)
        logits[1], logits[2] = 3.0, float("-inf")
        logits[3, width // 2], logits[4, width - 1] = float("inf"), float("nan")
        logits[5, [0, width - 1]] = 9.0
        logits[6] = -0.0
        assert torch.equal(CpuOps().best(logits), logits.argmax(-1)), width
