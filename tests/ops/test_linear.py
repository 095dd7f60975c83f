"""The packed linear of the CPU: any number of rows, few sizes that oneDNN has to keep kernels for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trencadis.backends.cpu import ops
from trencadis.backends.cpu.native.dense_linear import PASS, SIZES, pieces
from trencadis.backends.cpu.ops import CpuOps, PackedWeight, is_packable
from trencadis.backends.cpu.shape_policy import INVARIANT_ROWS
from trencadis.core.device.communicators_and_rank_agreement import SingleRank
from trencadis.core.models.mlp_and_norms import GatedMLP, PlainMLP


@given(st.integers(1, 100_000))
def test_pieces_are_sizes_and_cost_little(rows: int) -> None:
    found = pieces(rows)
    assert set(found) <= set(SIZES) and sum(found) - found[-1] < rows <= sum(found)
    assert sum(found) <= rows * 1.5 or rows < 4, "a weight is read once for up to 4 rows, whatever they are"
    assert sum(found) - rows <= 3 * PASS


def test_few_sizes_of_products() -> None:
    """What oneDNN keeps for ever is this many times the shapes of weights."""
    used = {size for rows in range(1, 5 * SIZES[-1]) for size in pieces(rows)}
    assert used == set(SIZES) and len(SIZES) <= 24
    assert all(len(pieces(rows)) == 1 for rows in range(1, 17)), "decoding reads the weights once"
    assert all(len(pieces(rows)) == 1 for rows in range(1, 129)), "and so do short prompts"
    assert all(len(pieces(rows)) <= 3 for rows in range(1, SIZES[-1]))


def test_sizes_of_batch_invariance_stay_its_multiples() -> None:
    rows = range(INVARIANT_ROWS, 3 * SIZES[-1], INVARIANT_ROWS)
    assert {size % INVARIANT_ROWS for count in rows for size in pieces(count)} == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_sees_only_sizes_and_answers_like_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_packable(dtype):
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
    for rows in (*range(1, 40), 100, 129, 257, 512, 513, 1024, 1094):
        x = torch.randn(rows, 32, generator=generator).to(dtype)
        got = CpuOps().linear(x, packed)
        assert got.shape == (rows, 24)
        expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        torch.testing.assert_close(got.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=1e-2)
    assert seen <= set(SIZES)
    seen.clear()
    assert CpuOps().linear(torch.empty(0, 32, dtype=dtype), packed).shape == (0, 24)
    assert seen <= {0}, "kernels of our own may take it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [GatedMLP, PlainMLP])
def test_an_mlp_takes_each_piece_through_all_products_and_answers_as_a_whole(
    dtype: torch.dtype, kind: type[GatedMLP | PlainMLP], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are cut as products would cut them, so that bits stay; and nothing between two products is longer."""
    if not is_packable(dtype):
        pytest.skip(f"oneDNN does not multiply {dtype} natively on this CPU")
    generator = torch.Generator().manual_seed(2)
    fast = CpuOps()
    mlp = kind(fast, SingleRank(), 32, 48)
    first = mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up
    first.pack(torch.randn(96 if kind is GatedMLP else 48, 32, generator=generator).to(dtype), None)
    mlp.down.pack(torch.randn(32, 48, generator=generator).to(dtype), None)
    longest: list[int] = []
    name = "act_mul" if kind is GatedMLP else "act"
    plain = getattr(fast, name)

    def noted(x: torch.Tensor, act: str) -> torch.Tensor:
        longest.append(len(x))
        made: torch.Tensor = plain(x, act)
        return made

    monkeypatch.setattr(fast, name, noted)
    for rows in (1, 33, 129, 512, 513, 700, 1094, 2048):
        x = torch.randn(rows, 32, generator=generator).to(dtype)
        longest.clear()
        found = mlp(x)
        assert max(longest) <= SIZES[-1] and sum(longest) == rows
        with monkeypatch.context() as patched:
            patched.setattr(fast, "by_pieces", lambda run, x: run(x))
            whole = mlp(x)
        if dtype == torch.bfloat16 and kind is GatedMLP and fast.table.number:
            assert torch.equal(found, whole), (
                rows
            )  # torch's own functions round otherwise at the ends of a thread's part
        error = float((found - whole).abs().max() / whole.abs().max())
        assert error <= (1e-2 if dtype == torch.bfloat16 else 1e-6), error
