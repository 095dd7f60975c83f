"""Weights that the library packs: the bytes are oneDNN's, from any stored type, and oneDNN multiplies them."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from trencadis.backends.cpu import make_backend
from trencadis.backends.cpu.native import weight_packing
from trencadis.backends.cpu.native.kernel_choice_by_cpu import VARIABLE, chosen_table
from trencadis.backends.cpu.ops import CpuOps, PackedWeight
from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.checkpoint.weight_source_interface import StackedPart, StoredRows
from trencadis.core.device.backend import BackendConfig
from trencadis.core.models.linear_and_embedding import Linear, RowParallelLinear
from trencadis.core.models.rotary_embedding import PartialRotarySource

TYPES = kernel_kinds.shared_types()
STORED = (torch.float32, torch.bfloat16, torch.float16)
PACKING = [kind for kind in ("avx2", kernel_kinds.DENSE) if kind in kernel_kinds.OWN]
DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
pytestmark = pytest.mark.skipif(not TYPES, reason="oneDNN's layout is not known here")


@pytest.fixture(autouse=True, params=PACKING)
def own_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of vectors, whatever kernels serve on this CPU otherwise."""
    monkeypatch.setenv(VARIABLE, request.param)


def memory(packed: Tensor | None) -> bytes:
    """Its bytes; what is no number has the same ones everywhere."""
    assert packed is not None
    size: int = torch.ops.mkldnn._nbytes(packed)
    raw = bytes((ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(packed)))
    values = torch.frombuffer(bytearray(raw), dtype=packed.dtype)
    values[values.isnan()] = float("nan")
    return values.view(torch.uint8).numpy().tobytes()


def odd(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random values, among them what rounding finds hard."""
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3
    hard = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-41, 3.3961e38, 1.00390625, 1.01171875])
    made.view(-1)[: len(hard)] = hard
    return made.to(dtype)


@pytest.mark.parametrize(("source", "target"), [*product(STORED, TYPES)])
def test_bytes_are_those_of_onednns_packing(source: torch.dtype, target: torch.dtype) -> None:
    cases = (
        # rows of each part, their widths, stored columns, the first that is taken, inputs
        ((64,), (64,), 32, 0, 32),
        ((65,), (70,), 34, 0, 34),
        ((100, 7, 30), (100, 16, 30), 90, 0, 90),
        ((130,), (130,), 200, 50, 120),
    )
    for number, (counts, widths, stored, first, inputs) in enumerate(cases):
        parts = [odd(rows, stored, source, number + i)[:, first : first + inputs] for i, rows in enumerate(counts)]
        some = min(inputs, stored - first)
        whole = torch.zeros(sum(widths), inputs, dtype=target)
        at = 0
        for part, width in zip(parts, widths, strict=True):
            whole[at : at + len(part), :some] = part.to(target)
            at += width
        with kernel_kinds.threads(1 + 2 * (number % 2)):
            made = weight_packing.pack_rows(parts, widths, inputs, target, chosen_table())
        found = made and made.tensor
        assert found is not None and found.shape == whole.shape
        with kernel_kinds.threads(1):  # with more, oneDNN packs float32 otherwise on a CPU with AVX2 alone
            reference = torch.ops.mkldnn._reorder_linear_weight(whole)
        assert memory(found) == memory(reference), (counts, inputs)


def test_rows_may_be_shorter_than_their_inputs() -> None:
    part = odd(70, 20, torch.float32, 1).nan_to_num_()
    made = weight_packing.pack_rows([part], [70], 48, torch.float32, chosen_table())
    found = made and made.tensor
    assert found is not None
    whole = torch.nn.functional.pad(part, (0, 28))
    with kernel_kinds.threads(1):
        assert memory(found) == memory(torch.ops.mkldnn._reorder_linear_weight(whole))


@pytest.mark.parametrize("dtype", TYPES)
def test_onednn_multiplies_them_and_their_memory_lives_as_long_as_they_do(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(n, 130, generator=generator).to(dtype) for n in (200, 64, 1000)]
    reference = [torch.ops.mkldnn._reorder_linear_weight(w) for w in weights]
    ours = [CpuOps().pack_weight(w) for w in weights]
    gc.collect()
    filled = [
        weight_packing.pages.take(1 << 16).fill_(255) for _ in range(50)
    ]  # nobody may be given memory that is in use
    x = torch.randn(300, 130, generator=generator).to(dtype)
    for packed, other in zip(ours, reference, strict=True):
        assert isinstance(packed, PackedWeight) and packed.panels is not None
        one, two = (
            torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "") for w in (packed.packed, other)
        )
        assert torch.equal(one, two)
    del filled


def test_weights_that_nobody_holds_give_their_memory_back() -> None:
    """An engine that is closed in a process that lives on: torch's own handle of the memory is dropped, too."""
    held = list[weakref.ref[torch.Tensor]]()
    for _ in range(3):
        packed = CpuOps().pack_weight(torch.randn(200, 130).bfloat16())
        assert isinstance(packed, PackedWeight)
        if packed.packed is not None:
            held.append(weakref.ref(packed.packed))
        else:  # a CPU on which oneDNN does not multiply bfloat16
            assert packed.panels is not None
            held.append(weakref.ref(packed.panels.held[1]))
        del packed
    gc.collect()
    assert [one() for one in held] == [None] * len(held)


def test_pages_are_given_once_and_begin_at_lines_of_the_cache() -> None:
    made = weight_packing.Pages()
    taken = [made.take(size) for size in (1, 63, 64, 65, weight_packing.CHUNK, 100, 3 * weight_packing.CHUNK + 1, 7)]
    places = sorted((t.data_ptr(), t.data_ptr() + len(t)) for t in taken)
    assert all(start % 64 == 0 for start, _ in places)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(places))
    assert all(not t[:: 1 << 16].any() for t in taken)


def test_a_layout_of_another_name_is_packed_by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = weight_packing._description
    monkeypatch.setattr(weight_packing, "_description", lambda packed: real(packed)[:-1] + bytes([packed.shape[0] % 7]))
    weight_packing._names.cache_clear()
    weight_packing.name_of.cache_clear()
    try:
        weight = torch.randn(96, 64)
        alone = chosen_table().needs_no_library
        made = weight_packing.pack_rows([weight], [96], 64, torch.float32, chosen_table())
        assert made is None if not alone else made is not None and made.tensor is None
        packed = CpuOps().pack_weight(weight)
        assert isinstance(packed, PackedWeight) and torch.allclose(
            CpuOps().linear(torch.eye(64), packed), weight.T, atol=1e-6
        )
    finally:
        weight_packing._names.cache_clear()
        weight_packing.name_of.cache_clear()


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_of_a_checkpoint_are_the_same_in_one_pass(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined rows, and columns of a rank, by the layers' own loading."""
    config = load_config(DEMO)
    backend = make_backend(BackendConfig(dtype=dtype, options={"threads": "1"}))
    source = CheckpointSource(open_weights(DEMO), family_of(config.architecture).names, backend, config)
    passes: list[StoredRows] = []
    pack = CpuOps.pack_stored

    def noted(self: CpuOps, rows: StoredRows, bias: Tensor | None) -> Any:
        passes.append(rows)
        return pack(self, rows, bias)

    monkeypatch.setattr(CpuOps, "pack_stored", noted)
    c = config.text

    class Second:
        rank, world = 1, 2

    down = RowParallelLinear(backend.ops, Second(), c.intermediate, c.hidden)  # type: ignore[arg-type]
    down.load(source, "layers.0.mlp.down_proj")
    assert len(passes) == 1 and passes[0].parts[0].dtype == source.tensors["layers.0.mlp.down_proj.weight"].dtype
    half = c.intermediate // 2
    plain = source.take("layers.0.mlp.down_proj.weight", (c.hidden, c.intermediate))[:, half:]
    other = CpuOps().pack_weight(plain.contiguous())
    assert isinstance(other, PackedWeight) and isinstance(down.weights[0], PackedWeight)
    assert memory(down.weights[0].packed) == memory(other.packed) and down.bytes == plain.nbytes
    width = c.intermediate
    names = [f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")]
    parts = [StackedPart(name, width, 0, width, width) for name in names]
    joined, apart = Linear(backend.ops, backend.comm), Linear(backend.ops, backend.comm)
    assert joined.pack_stored(source, parts, (c.hidden, 0, c.hidden, c.hidden), None)
    apart.pack(source.take_stacked(parts, c.hidden), None)
    assert memory(joined.weights[0].packed) == memory(apart.weights[0].packed)  # type: ignore[attr-defined]
    turned = PartialRotarySource(source, c.head_dim, c.head_dim // 2)
    query = StackedPart("layers.0.self_attn.q_proj.weight", c.hidden, 0, c.hidden, c.hidden)
    assert turned.stored([query], c.hidden, 0, c.hidden) is None and turned.stored(parts, c.hidden, 0, 8) is not None


def test_types_that_differ_within_a_weight_are_joined_first() -> None:
    rows = [torch.randn(64, 32), torch.randn(64, 32).to(torch.bfloat16)]
    assert weight_packing.pack_rows(rows, [64, 64], 32, torch.float32, chosen_table()) is None


def test_threads_that_load_get_memory_apart() -> None:
    """Ranks may be threads of one process; two that got the same memory would multiply each other's weights."""
    before, pages, taken = sys.getswitchinterval(), weight_packing.Pages(), list[Tensor]()

    def take() -> None:
        taken.extend([pages.take(64) for _ in range(2000)])

    threads = [threading.Thread(target=take) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    apart = len({t.data_ptr() for t in taken})
    assert apart == 4 * 2000
