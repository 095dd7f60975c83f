"""The library's products with LoRA adapters are held to float64 and to torch's path, by each kind of kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests import kernel_kinds
from trencadis.backends.cpu.lora_adapter_products import group_rows
from trencadis.backends.cpu.native import lora_adapter_kernels
from trencadis.backends.cpu.native.kernel_choice_by_cpu import TORCH
from trencadis.backends.cpu.native.lora_adapter_kernels import SlotAdapters
from trencadis.backends.cpu.ops import CpuOps
from trencadis.core.device.backend import AdapterWeights

KINDS = pytest.mark.parametrize("kind", kernel_kinds.OWN)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SLOTS, RANK, WIDTHS = 3, 8, (130, 64, 7)
RUNS = [0, 1, 1, 0, 3, *[2] * 45, 1, 3, 3, 0]
"""Slots of the rows of a launch: single rows, a run longer than a piece, and rows without an adapter."""


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3).to(dtype)


def filled(kind: str, inputs: int, dtype: torch.dtype) -> tuple[SlotAdapters, AdapterWeights]:
    """The same adapters in both layouts; a slot and a part have a smaller rank, and one part is missing."""
    made = lora_adapter_kernels.allocate(SLOTS, RANK, inputs, WIDTHS, dtype, kernel_kinds.table(kind))
    assert made is not None and made.nbytes == made.a.nbytes + made.b.nbytes
    a = torch.zeros((SLOTS, len(WIDTHS), RANK, inputs), dtype=dtype)
    b = tuple(torch.zeros((SLOTS, RANK, width), dtype=dtype) for width in WIDTHS)
    for slot in range(SLOTS):
        parts: list[tuple[Tensor, Tensor] | None] = [
            (random((RANK, inputs), dtype, 90), random((RANK, width), dtype, 91)) for width in WIDTHS
        ]
        made.put(slot, made.pack(parts))  # to be replaced
        for part, width in enumerate(WIDTHS):
            parts[part] = None
            if (slot, part) == (1, 1):
                continue
            rank, seed = (5 if slot == 2 or (slot, part) == (1, 0) else RANK), 10 * slot + part
            one, other = random((rank, inputs), dtype, seed), random((rank, width), dtype, seed + 50)
            parts[part] = one, other
            a[slot, part, :rank], b[part][slot, :rank] = one, other
        made.put(slot, made.pack(parts))
    return made, AdapterWeights(a, b)


def wanted(y: Tensor, x: Tensor, w: AdapterWeights, ids: list[int]) -> Tensor:
    """The sums in float64."""
    made = y.double()
    for row, slot in enumerate(ids):
        if slot:
            made[row] += torch.cat(
                [x[row].double() @ w.a[slot - 1, i].double().t() @ b[slot - 1].double() for i, b in enumerate(w.b)]
            )
    return made


@KINDS
@TYPES
@pytest.mark.parametrize("inputs", [96, 53])
def test_sums_equal_float64_and_bits_depend_on_the_row_alone(kind: str, dtype: torch.dtype, inputs: int) -> None:
    table = kernel_kinds.table(kind)
    w, plain = filled(kind, inputs, dtype)
    x, y = random((len(RUNS), inputs + 8), dtype, 1)[:, 3 : 3 + inputs], random((len(RUNS), sum(WIDTHS)), dtype, 2)
    pieces, found = group_rows(torch.tensor(RUNS), torch.arange(1, SLOTS + 1), dtype).pieces, list[Tensor]()
    for count in (1, 2, 3, 8):
        with kernel_kinds.threads(count), kernel_kinds.served("adapters", table):
            found.append(y.clone())
            lora_adapter_kernels.add(found[-1], x, w, pieces)
        assert torch.equal(found[0], found[-1]), count
    bar = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(found[0].double(), wanted(y, x, plain, RUNS), rtol=bar, atol=bar)
    for row, slot in enumerate(RUNS):
        alone = y[row : row + 1].clone()
        if slot:
            lora_adapter_kernels.add(alone, x[row : row + 1], w, lora_adapter_kernels.cut_runs([(0, 1, slot)]))
        assert torch.equal(alone[0], found[0][row]), row


@KINDS
def test_no_number_reaches_another_row(kind: str) -> None:
    w, plain = filled(kind, 40, torch.float32)
    ids, x, y = [1, 1, 1, 1, 0, 2], random((6, 40), torch.float32, 1), random((6, sum(WIDTHS)), torch.float32, 2)
    want = wanted(y, x, plain, ids)
    x[2], x[4] = float("nan"), float("nan")
    lora_adapter_kernels.add(y, x, w, lora_adapter_kernels.cut_runs([(0, 4, 1), (5, 6, 2)]))
    real = [0, 1, 3, 4, 5]
    assert y[2].isnan().all()
    torch.testing.assert_close(y[real].double(), want[real], rtol=1e-5, atol=1e-5)


def test_ops_take_the_kernel_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of a rank that the kernel lacks, and those of torch's kernels, are kept unpacked."""
    ops = CpuOps()
    ops.table = kernel_kinds.table(TORCH)
    assert ops.allocate_adapters(SLOTS, RANK, 40, WIDTHS, torch.float32) is None
    if not kernel_kinds.OWN:
        return
    ops.table = kernel_kinds.table(kernel_kinds.OWN[0])
    assert ops.allocate_adapters(SLOTS, 6, 40, WIDTHS, torch.float32) is None
    w, plain = filled(ops.table.kind, 40, torch.float32)
    x, y = random((4, 40), torch.float32, 3), random((4, sum(WIDTHS)), torch.float32, 4)
    rows = ops.prepare_adapters(torch.tensor([1, 1, 0, 3]), torch.arange(1, SLOTS + 1), torch.float32)
    want = wanted(y, x, plain, [1, 1, 0, 3])
    for held in (w, plain):
        found = ops.add_adapters(y.clone(), x, held, rows)
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
