"""Which kernels serve on which CPU, and what holds where oneDNN keeps weights in a layout of its own (AMX)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from trencadis.backends.cpu import ops
from trencadis.backends.cpu.batch_invariant import FIXED_ROWS, PROBES, InvariantOps
from trencadis.backends.cpu.native import kernel_choice_by_cpu, kernel_library, weight_packing
from trencadis.backends.cpu.native.kernel_choice_by_cpu import (
    ANY,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    KINDS,
    SHARED_ROWS,
    TILED,
    TORCH,
    VARIABLE,
    Op,
    table_of,
)
from trencadis.backends.cpu.ops import CpuOps, PackedWeight
from trencadis.core import devices
from trencadis.core.device.backend import Segments
from trencadis.core.errors import StartupError

ZEN4 = {"avx2", "avx512", "avx512_vnni", "avx512_bf16"}
SAPPHIRE_RAPIDS = {*ZEN4, "avx_vnni", "amx"}
SKYLAKE = {"avx2", "avx512"}


@pytest.mark.parametrize(
    ("kind", "features", "float32", "bfloat16"),
    [
        ("avx2", {"avx2"}, SHARED_ROWS, ANY),  # nothing but ours is fast in bfloat16 there
        ("avx_vnni", {"avx2", "avx_vnni"}, SHARED_ROWS, ANY),
        ("avx2", ZEN4, SHARED_ROWS, SHARED_ROWS),
        ("avx512", SKYLAKE, SHARED_ROWS, ANY),
        ("avx512_vnni", ZEN4, SHARED_ROWS, SHARED_ROWS),
        ("avx512_vnni", SAPPHIRE_RAPIDS, SHARED_ROWS, ANY),  # no product of oneDNN reads our layout there
        ("amx", SAPPHIRE_RAPIDS, SHARED_ROWS, ANY),  # by tiles
        ("amx_emulated", {"avx2"}, SHARED_ROWS, ANY),
    ],
)
def test_products_by_cpu(kind: str, features: set[str], float32: int, bfloat16: int) -> None:
    table = table_of(kind, features)
    assert table.most_rows(Op.LINEAR, FLOAT32) == float32 and table.most_rows(Op.LINEAR, BFLOAT16) == bfloat16
    assert table.serves(Op.ATTENTION, BFLOAT16) == (kind not in TILED)
    every = table_of(kind, features, every_row=True)
    assert every.most_rows(Op.LINEAR, FLOAT32) == ANY
    assert table.bfloat16_pairs == ((kind.startswith("avx512") or kind == "amx") and "avx512_bf16" in features)
    if kind in TILED:
        assert every.most_rows(Op.LINEAR, BFLOAT16) == ANY and every.serves(Op.ATTENTION, BFLOAT16)


def test_torch_serves_all_or_nothing_of_a_type() -> None:
    assert not table_of(TORCH, SAPPHIRE_RAPIDS).rows and not table_of(TORCH, SAPPHIRE_RAPIDS).number
    for kind in KINDS:
        table = table_of(kind, SAPPHIRE_RAPIDS)
        for op in (Op.QUANTISED_LINEAR, Op.DECODE_ATTENTION, Op.ROTARY, Op.ARGMAX):
            assert all(table.most_rows(op, dtype) == ANY for dtype in (FLOAT32, BFLOAT16, FLOAT16))
        assert not table.serves(Op.LINEAR, FLOAT16) and not table.serves(Op.ROWWISE, FLOAT32)


def test_the_variable_chooses_for_all_types(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (*kernel_kinds.OWN, TORCH):
        monkeypatch.setenv(VARIABLE, kind)
        assert CpuOps().table.kind == kind and devices.kernels() in devices.describe_devices()[-1]
        assert f"{VARIABLE} is {kind}" in devices.kernels()
    missing = next((kind for kind in KINDS if kind not in kernel_kinds.OWN), None)
    if missing is not None:
        monkeypatch.setenv(VARIABLE, missing)
        with pytest.raises(StartupError, match=f"{VARIABLE}={missing}: these kernels cannot serve: "):
            kernel_choice_by_cpu.chosen_table()


def test_numbers_are_those_of_the_header() -> None:
    if kernel_library.load_library().library is None:
        pytest.skip(kernel_library.load_library().why)
    for kind in kernel_kinds.OWN:
        logits, table = torch.randn(2, 50), kernel_kinds.table(kind)
        made = CpuOps()
        made.table = table
        with kernel_kinds.served("rowwise", table):
            assert torch.equal(made.best(logits), logits.argmax(-1))


@pytest.fixture
def other_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """oneDNN's layout is not ours, as on a CPU with AMX."""
    if not kernel_kinds.DENSE:
        pytest.skip("this CPU multiplies no weight of 16 or 32 bits by own kernels")
    monkeypatch.setenv(VARIABLE, kernel_kinds.DENSE)
    monkeypatch.setattr(weight_packing, "name_of", lambda *_: None)
    yield


def own_layout_ops(made: CpuOps) -> CpuOps:
    made.table = table_of(kernel_kinds.DENSE, kernel_kinds.FEATURES | {"amx"}, every_row=True)
    return made


@pytest.mark.usefixtures("other_layout")
@pytest.mark.parametrize("dtype", kernel_kinds.dense_types())
def test_weights_in_our_own_layout_serve_any_number_of_rows(dtype: torch.dtype) -> None:
    """Products, the best output and embeddings, with no copy in oneDNN's layout, down to a weight of one output."""
    generator, fast = torch.Generator().manual_seed(1), own_layout_ops(CpuOps())
    for outputs, inputs in ((1, 32), (65, 34), (200, 130)):
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        packed = fast.pack_weight(weight, bias)
        assert isinstance(packed, PackedWeight) and packed.packed is None and packed.panels is not None
        x = torch.randn(300, inputs, generator=generator).to(dtype)
        with kernel_kinds.served("linear", fast.table):
            whole = fast.linear(x, packed)
        exact = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(whole.double(), exact, rtol=1e-2, atol=0.2 if dtype == torch.bfloat16 else 1e-4)
        for start, stop in ((0, 1), (3, 132), (120, 300), (7, 7)):
            assert torch.equal(fast.linear(x[start:stop], packed), whole[start:stop])
        assert torch.equal(fast.linear(x.T.contiguous().T, packed), whole), "a view by columns"
    tied = fast.pack_weight(weight)
    found, wanted = fast.best_outputs(x, tied, outputs, 1.0), fast.linear(x, tied).argmax(-1)
    assert found is not None and torch.equal(0x7FFFFFFF - (found & 0xFFFFFFFF), wanted)
    shared = fast.table_of(tied)
    assert shared is not None
    ids, none = torch.arange(outputs, dtype=torch.int32), torch.zeros(outputs, dtype=torch.int32)
    assert torch.equal(fast.embed(ids, none, none, none, weight[:1], shared), weight)


@pytest.mark.usefixtures("other_layout")
@pytest.mark.parametrize("dtype", kernel_kinds.dense_types())
def test_batch_invariance_needs_no_product_of_onednn(dtype: torch.dtype) -> None:
    made = own_layout_ops(InvariantOps())
    packed = made.pack_weight(torch.randn(96, 64).to(dtype))
    assert isinstance(packed, PackedWeight) and packed.packed is None
    x = torch.randn(140, 64).to(dtype)
    whole = made.linear(x, packed)
    assert all(torch.equal(made.linear(x[i : i + n], packed), whole[i : i + n]) for i, n in ((0, 1), (5, 130), (9, 3)))


@pytest.mark.parametrize("harm", ["by its rows", "by its place"])
def test_products_that_depend_on_the_number_of_rows_get_a_fixed_one(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's do on tiles; what depends on a row's place as well is still refused."""
    monkeypatch.setenv(VARIABLE, TORCH)
    product = ops._product

    def careless(x: Tensor, w: PackedWeight) -> Tensor:
        y = product(x, w)
        if harm == "by its rows":
            return y * (1 + 2**-20 * (len(x) % FIXED_ROWS != 0))
        return y * (1 + 2**-20 * (torch.arange(len(x))[:, None] % 3))

    monkeypatch.setattr(ops, "_product", careless)
    made, weight = InvariantOps(), torch.randn(96, 64)
    if harm == "by its place":
        with pytest.raises(StartupError, match="--batch-invariant: on this device"):
            made.pack_weight(weight)
        return
    packed, x = made.pack_weight(weight), torch.randn(200, 64)
    whole = made.linear(x, packed)
    for count in (1, 3, 64, 65, 128, *PROBES[:2]):
        assert torch.equal(made.linear(x[2 : 2 + count], packed), whole[2 : 2 + count]), count
    assert made.linear(x[:0], packed).shape == (0, 96)


def test_torchs_windows_are_alone_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under --batch-invariant; torch chooses another way by how many windows a call has."""
    sizes = list[int]()
    plain = torch.nn.functional.scaled_dot_product_attention

    def noted(q: Tensor, *args: object, **more: object) -> Tensor:
        sizes.append(len(q))
        out: Tensor = plain(q, *args, **more)  # type: ignore[arg-type]
        return out

    made = InvariantOps()
    made.table = kernel_kinds.table(TORCH)
    q, k, v = torch.randn(3, 3 * 64, 2, 16)
    segments = Segments(torch.zeros(3, dtype=torch.int32), torch.tensor([64, 0, 7], dtype=torch.int32))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    found = made.attend_windows(q, k, v, segments, 0.25)
    assert sizes == [1, 1, 1] and not found[64:128].any() and not found[135:].any() and found[:64].any()
