"""The packed linear of the CPU: any number of rows, few sizes that oneDNN has to keep kernels for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trencadis.backends.cpu import ops
from trencadis.backends.cpu.ops import PIECE, CpuOps, PackedWeight, packable, rounded


@given(st.integers(17, 100_000))
def test_rounding_is_a_size_and_costs_at_most_an_eighth(rows: int) -> None:
    size = rounded(rows)
    assert rows <= size <= max(rows * 9 / 8, rows + 3)
    assert rounded(size) == size


def test_few_sizes_of_products() -> None:
    sizes = {rounded(rows) for rows in range(1, PIECE + 1)}
    assert len(sizes) == 48 and max(sizes) == PIECE
    assert all(rows <= rounded(rows) <= rows + 3 for rows in range(17))
    assert {rounded(rows) - 3 * PIECE for rows in range(3 * PIECE + 1, 4 * PIECE + 1)} == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_sees_only_sizes_and_answers_like_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packable(dtype):
        pytest.skip(f"oneDNN does not multiply {dtype} natively on this CPU")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 32, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype)
    packed = CpuOps().pack_weight(weight, bias)
    assert isinstance(packed, PackedWeight)
    seen: set[int] = set()
    product = ops._product

    def spy(x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
        seen.add(len(x))
        return product(x, w)

    monkeypatch.setattr(ops, "_product", spy)
    counts = (*range(1, 40), 100, 129, 257, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 70)
    for rows in counts:
        x = torch.randn(rows, 32, generator=generator).to(dtype)
        got = CpuOps().linear(x, packed)
        assert got.shape == (rows, 24)
        expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        torch.testing.assert_close(got.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=1e-2)
    assert seen == {PIECE, *(rounded(rows % PIECE) for rows in counts if rows % PIECE)}
    assert len(seen) < 24
