"""Products by tiles of AMX, on the stand-in whose instructions are plain C, so that they are tested on every CPU.

The kernels of a CPU with AMX are the same source with other instructions; there they are tested beside the stand-in.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import kernel_kinds
from tests.kernel_kinds import threads
from tests.quant.test_native import SCHEMES, weight
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.native import (
    dense_linear,
    kernel_choice_by_cpu,
    kernel_library,
    quantised_weight_panels,
    weight_packing,
)
from trencadis.backends.cpu.native.kernel_choice_by_cpu import BFLOAT16, EMULATED, KINDS, VARIABLE, Op, table_of
from trencadis.backends.cpu.native.weight_packing import CachedPages
from trencadis.backends.cpu.ops import CpuOps, PackedWeight
from trencadis.core.device.backend import BackendConfig
from trencadis.core.device.packed_weights_file import PackedFile
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

pytestmark = pytest.mark.skipif(not kernel_kinds.EMULATIONS, reason="own kernels are not built here")
TILED = [*kernel_kinds.EMULATIONS, *(kind for kind in kernel_kinds.OWN if kind == "amx")]
VNNI = next((kind for kind in ("avx512_vnni", "avx_vnni") if kind in kernel_kinds.OWN), "")
ROWS = (1, 4, 5, 16, 17, 33, 70)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=TILED)
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of kernels that multiplies by tiles and runs here."""
    kernel_choice_by_cpu._chosen.cache_clear()
    monkeypatch.setenv(VARIABLE, request.param)
    return str(request.param)


# ---- weights of 8 and 4 bits ----


@pytest.mark.skipif(not VNNI, reason="no kernels with VNNI run here")
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.label}{'' if s.symmetric else ', zero points'}")
def test_codes_have_the_bits_of_vnni(scheme: Scheme, tiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that fill no panel and no tile, groups of several spans, one thread and three, and an odd last block."""
    for shape, dtype in (((1, 1), torch.float32), ((17, 50), torch.float16), ((300, 700), torch.bfloat16),
                         ((64, 2200), torch.float32)):  # fmt: skip
        q, bias = weight(shape, scheme, dtype), random(shape[0], seed=2).to(dtype)
        packed = list[Any]()
        for kind in (tiled, VNNI):
            monkeypatch.setenv(VARIABLE, kind)
            packed.append(CpuOps().pack_quantised(q, bias))
        monkeypatch.setenv(VARIABLE, tiled)
        for rows, team in zip(ROWS, (1, 3) * len(ROWS), strict=False):
            x = random(rows, shape[1], seed=rows).to(dtype)
            with threads(team), kernel_kinds.served("quantised_linear", CpuOps().table):
                y = quantised_weight_panels.product(x, packed[0])
            assert torch.equal(y, quantised_weight_panels.product(x, packed[1])), (shape, rows)


@pytest.mark.skipif(not VNNI, reason="no kernels with VNNI run here")
def test_a_long_group_of_many_rows_has_the_bits_of_vnni(tiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of more steps than a span has, scales of groups and zero points, and a call's most rows."""
    for scheme in (Scheme(4, group=1100, symmetric=False), Scheme(8, group=1100), Scheme(8)):
        q, found = weight((70, 1990), scheme, torch.float32), []
        x = random(quantised_weight_panels.ROWS + 3, 1990, seed=5)
        for kind in (tiled, VNNI):
            monkeypatch.setenv(VARIABLE, kind)
            found.append(CpuOps().linear(x, CpuOps().pack_quantised(q)))
        assert torch.equal(*found), scheme


# ---- weights in bfloat16 ----


def fma(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """a * b + c rounded once, of bfloat16 a and b, as long as 53 bits hold the sum."""
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(np.float32)


def recompute(x: Tensor, w: Tensor) -> NDArray[np.float32]:
    """Products [n, outputs] by tiles as Intel's manual has them: of 32 inputs at a time, the first values of pairs and
    the second ones summed apart, both sums added, then added to the sum so far.
    """
    fill = -x.shape[1] % 32
    rows, weights = (np.pad(t.float().numpy(), ((0, 0), (0, fill))) for t in (x, w))
    total = np.zeros((len(rows), len(weights)), np.float32)
    for start in range(0, rows.shape[1], 32):
        halves = []
        for half in (0, 1):
            part = np.zeros_like(total)
            for i in range(start + half, start + 32, 2):
                part = fma(rows[:, i, None], weights[None, :, i], part)
            halves.append(part)
        total = total + (halves[0] + halves[1])
    return total


def test_sums_are_those_of_the_instruction(tiled: str) -> None:
    """To the last bit, from a model of its own; odd shapes, rows of a view, a bias added last."""
    for outputs, inputs, rows in ((64, 32, 3), (65, 34, 16), (130, 96, 21), (200, 610, 35)):
        w, bias = random(outputs, inputs).bfloat16(), random(outputs, seed=1).bfloat16()
        x = random(rows, inputs + 6, seed=2).bfloat16()[:, 4 : 4 + inputs]
        packed = CpuOps().pack_weight(w, bias)
        with kernel_kinds.served("linear", CpuOps().table):
            y = CpuOps().linear(x, packed)
        wanted = torch.from_numpy(recompute(x, w) + bias.float().numpy()).bfloat16()
        assert torch.equal(y, wanted), (outputs, inputs, rows)


def test_denormal_numbers_count_as_zeros(tiled: str) -> None:
    least, small = 2.0**-133, 2.0**-100
    w, x = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(2, 32, dtype=torch.bfloat16)
    w[0, 0], w[1, 0], w[2, 0], w[3, 0] = least, small, 1.0, float("inf")
    x[0, 0], x[1, 0] = 2.0**100, small
    y = CpuOps().linear(x, CpuOps().pack_weight(w))
    assert y[:, 0].tolist() == [0, 0], "a denormal weight"
    assert y[0, 1:4].tolist() == [1.0, 2.0**100, float("inf")] and y[1, 1:3].tolist() == [0.0, small]
    assert not y[:, 4:].nan_to_num(1).any()
    x[0, 0], x[1, 0] = least, float("nan")
    y = CpuOps().linear(x, CpuOps().pack_weight(w))
    assert y[0, :3].tolist() == [0, 0, 0] and bool(y[0, 3].isnan()), "zero times infinity"
    assert bool(y[1].isnan().all()), "what is no number stays in its row"


def test_a_row_has_the_same_bits_alone_in_company_and_on_any_threads(tiled: str) -> None:
    w, x = random(200, 330).bfloat16(), random(dense_linear.TILE_ROWS + 9, 330, seed=1).bfloat16()
    packed, ops = CpuOps().pack_weight(w), CpuOps()
    with threads(1):
        whole = ops.linear(x, packed)
    for rows, team in ((1, 1), (2, 5), (15, 8), (16, 2), (17, 3), (64, 4), (200, 6), (512, 7), (521, 8)):
        with threads(team):
            assert torch.equal(ops.linear(x[-rows:], packed), whole[-rows:]), (rows, team)
    assert all(torch.equal(ops.linear(x[i : i + 1], packed), whole[i : i + 1]) for i in range(0, 64, 7))


@pytest.mark.parametrize("held", ["bfloat16", "int8", "int4"])
def test_batch_invariance_is_accepted(held: str, tiled: str) -> None:
    ops, w = InvariantOps(), random(200, 300).bfloat16()
    scheme = Scheme(8) if held == "int8" else Scheme(4, group=32)
    packed = ops.pack_weight(w) if held == "bfloat16" else ops.pack_quantised(quantise(w, scheme, torch.bfloat16))
    assert ops.table.by_tiles(Op.LINEAR, BFLOAT16) and not ops._fixed
    x = random(140, 300, seed=1).bfloat16()
    whole = ops.linear(x, packed)
    for start, rows in ((0, 1), (5, 130), (9, 3), (60, 64)):
        assert torch.equal(ops.linear(x[start : start + rows], packed), whole[start : start + rows])


# ---- layouts ----


@pytest.fixture
def other_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's layout of bfloat16 is not ours, as on a CPU with AMX."""
    monkeypatch.setattr(weight_packing, "name_of", lambda *_: None)
    monkeypatch.setattr(dense_linear, "_lies", lambda *_: False)


@pytest.mark.usefixtures("other_layout")
def test_bfloat16_has_head_shared_table_and_file(tiled: str, tmp_path: Path) -> None:
    """On a CPU with AMX a weight is held in our layout alone: the best output, embeddings, packing and the cache."""
    file, w = PackedFile(tmp_path / "packed", (("demo", 1, 1),)), random(300, 90).bfloat16()
    x = random(40, 90, seed=1).bfloat16()
    for start in range(2):
        ops = CpuOps()
        ops.pages = CachedPages(file)
        assert ops.keeps() == bool(start)
        packed = ops.pack_weight(w)
        assert isinstance(packed, PackedWeight) and packed.packed is None
        assert ops.finish_loading() == start * 320 * 96 * 2
        if ops.pages.writing is not None:
            ops.pages.writing.join(60)
        with kernel_kinds.served("linear", ops.table):
            found = ops.best_outputs(x, packed, 290, 1.0)
        assert found is not None
        assert torch.equal(dense_linear.LAST - (found & 0xFFFFFFFF), ops.linear(x, packed)[:, :290].argmax(-1))
        table = ops.table_of(packed)
        assert table is not None and torch.equal(dense_linear.rows_of(table, torch.arange(300)), w)


@pytest.mark.usefixtures("other_layout")
def test_a_table_may_leave_many_rows_to_onednn(tiled: str) -> None:
    """Then weights are held in both layouts."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN does not multiply bfloat16 here")
    ops, w = CpuOps(), random(100, 64).bfloat16()
    ops.table = table_of(tiled, kernel_kinds.FEATURES, tiled_rows=16)
    packed = ops.pack_weight(w)
    assert isinstance(packed, PackedWeight) and packed.packed is not None and packed.panels is not None
    x = random(17, 64, seed=1).bfloat16()
    with kernel_kinds.served("linear", ops.table):
        few = ops.linear(x[:16], packed)
    with kernel_kinds.served("linear", ops.table, own=False):
        many = ops.linear(x, packed)
    torch.testing.assert_close(few, many[:16], rtol=1e-2, atol=0.1)


def test_tiles_take_the_rows_of_an_mlp_in_whole_calls(tiled: str) -> None:
    """oneDNN would compute 300 rows as 256 and more, and read the weights twice."""
    ops, seen = CpuOps(), list[int]()

    def run(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x + 1

    for dtype, wanted in ((torch.bfloat16, [300, dense_linear.TILE_ROWS, 1]), (torch.float32, [256, 44, 512, 1])):
        seen.clear()
        for rows in (300, dense_linear.TILE_ROWS + 1):
            x = random(rows, 2).to(dtype)
            assert torch.equal(ops.by_pieces(run, x), x + 1)
        assert seen == wanted, dtype
    assert dense_linear.launch_rows(ops.table, torch.bfloat16) == kernel_choice_by_cpu.SHARED_ROWS, (
        "torch attends in longer prompts"
    )


# ---- which kernels serve ----


def test_the_start_says_what_tiles_multiply() -> None:
    line = table_of("amx", {*KINDS["amx"], "avx2", "avx512_bf16"}).line()
    assert "products of up to 128 rows in float32, of any number in bfloat16, bfloat16 by tiles" in line
    assert "8- and 4-bit weights by tiles" in line


def test_the_stand_in_serves_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    kernel_choice_by_cpu._chosen.cache_clear()
    assert (
        kernel_choice_by_cpu.chosen_table().kind != EMULATED and EMULATED not in kernel_choice_by_cpu.available_kinds()
    )
    monkeypatch.setenv(VARIABLE, EMULATED)
    assert make_backend(BackendConfig(options={"threads": "1"})).ops.table.kind == EMULATED  # type: ignore[attr-defined]


C1, C7_B, C7_C, C7_D, C71_A = (
    1 << 12 | 1 << 27 | 1 << 29, 1 << 5 | 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31, 1 << 11, 1 << 22 | 1 << 24 | 1 << 25,
    1 << 4 | 1 << 5,
)  # fmt: skip
SAVED, TILES = 0xE7, 0x60000


@pytest.mark.parametrize(
    ("d", "saved", "permitted", "kind"),
    [
        (C7_D, SAVED | TILES, 1, "amx"),
        (C7_D, SAVED | TILES, 0, "avx512_vnni"),  # Linux grants no tiles
        (C7_D, SAVED, 1, "avx512_vnni"),  # the system saves none
        (C7_D, SAVED | 0x20000, 1, "avx512_vnni"),
        (C7_D & ~(1 << 22), SAVED | TILES, 1, "avx512_vnni"),  # no products of bfloat16
        (C7_D & ~(1 << 25), SAVED | TILES, 1, "avx512_vnni"),
        (0, SAVED | TILES, 1, "avx512_vnni"),
        (C7_D, 0x7, 1, "avx_vnni"),  # no vectors of 512 bits
        (C7_D, 0x1, 1, ""),
    ],
)
def test_tiles_count_only_if_cpu_and_system_allow_them(d: int, saved: int, permitted: int, kind: str) -> None:
    found = (ctypes.c_uint32 * 6)(C1, 1, C7_B, C7_C, d, C71_A)
    call = kernel_library.load_library().library.trencadis_features_of
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int), ctypes.c_int
    bits = call(found, saved, permitted)
    features = {name for number, name in enumerate(kernel_library.FEATURES) if bits >> number & 1}
    kinds = [name for name, needs in KINDS.items() if needs <= features]
    assert (kinds[-1] if kinds else "") == kind
    if kind == "avx512_vnni":  # oneDNN then shares our layout
        assert table_of(kind, features).most_rows(Op.LINEAR, BFLOAT16) == kernel_choice_by_cpu.SHARED_ROWS


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_kernels_of_amx_are_made_of_its_instructions() -> None:
    have = kernel_library.load_library()
    if "panels_amx.c" in have.left_out:
        pytest.skip("the C compiler knows no AMX")
    if Path(have.library._name).parent != Path(kernel_library.__file__).parent:
        pytest.skip("a library of sanitizers, large and the same")
    words = ["objdump", "-d", "--no-show-raw-insn", have.library._name]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in ("ldtilecfg", "tdpbf16ps", "tdpbsud", "tileloadd", "tilestored", "tilezero", "tilerelease"):
        assert any(f"\t{name}" in line for line in lines), name
