"""The packed linear of the CPU: any number of rows, few sizes that oneDNN has to keep kernels for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trencadis.backends.cpu import ops
from trencadis.backends.cpu.ops import CpuOps, PackedWeight, packable, rounded


@given(st.integers(1, 100_000))
def test_rounding_is_a_size_and_costs_at_most_an_eighth(rows: int) -> None:
    size = rounded(rows)
    assert rows <= size <= rows * 9 / 8
    assert rounded(size) == size


def test_few_sizes() -> None:
    assert len({rounded(rows) for rows in range(1, 32769)}) <= 16 + 8 * 11
    assert all(rounded(rows) == rows for rows in range(1, 17))


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
    for rows in (*range(1, 40), 100, 129, 257):
        x = torch.randn(rows, 32, generator=generator).to(dtype)
        got = CpuOps().linear(x, packed)
        assert got.shape == (rows, 24)
        expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        torch.testing.assert_close(got.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=1e-2)
    assert seen == {rounded(rows) for rows in (*range(1, 40), 100, 129, 257)}
    assert len(seen) < 33
