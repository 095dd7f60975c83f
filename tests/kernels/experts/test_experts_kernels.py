"""The kernels of experts equal the reference, in every order of programs, and give a token the same bits in company."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.oracles import interpreter
from trencadis.backends.cpu.expert_mlp import route_tokens
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cuda.kernels import fused_moe, quantised_fused_moe, tile_sizes
from trencadis.backends.cuda.ops import CudaOps, InvariantCudaOps
from trencadis.backends.cuda.weights.stacked_experts import StackedExperts
from trencadis.core.device.backend import ExpertBiases

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = tile_sizes.Tile(16, 32, 4, 1)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scores_of(rows: int, count: int, seed: int = 5) -> Tensor:
    """Scores that lie apart, so that no rounding moves a choice."""
    places = torch.rand(rows, count, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return 0.25 * places.float()


def weights(count: int, inner: int, hidden: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    gate_up = [(normal(2 * inner, hidden, seed=i) / hidden**0.5).to(dtype) for i in range(count)]
    return gate_up, [(normal(hidden, inner, seed=99 + i) / inner**0.5).to(dtype) for i in range(count)]


def pack(
    ops: ReferenceOps, each: tuple[list[Tensor], list[Tensor]], device: torch.device, dtype: torch.dtype,
    biases: ExpertBiases | None = None,
) -> Any:  # fmt: skip
    gate_up, down = ([t.to(device, dtype) for t in some] for some in each)
    return ops.pack_experts(gate_up, down, biases)


CASES = [
    (n, count, top, kind, dtype)
    for n in (1, 7, 40)
    for count, top, kind in ((5, 2, "silu"), (8, 8, "gelu"), (12, 3, "relu"))
    for dtype in TOLERANCE
]


@pytest.mark.parametrize(
    ("n", "count", "top", "kind", "dtype"),
    [pytest.param(*case, marks=() if i % 7 == 4 else pytest.mark.long) for i, case in enumerate(CASES)],
)
def test_experts_equal_the_reference(
    n: int, count: int, top: int, kind: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that no tile divides; shares as they are and divided by their sum."""
    monkeypatch.setitem(tile_sizes.FORCED, "experts", SMALL)
    each, x = weights(count, 40, 72, dtype), normal(n, 72, seed=n).to(dtype)
    scores = scores_of(n, count)
    for normalise in (True, False):
        slow, ops = ReferenceOps(), CudaOps()
        joined = pack(slow, each, torch.device("cpu"), torch.float32)
        want = slow.experts(x.float(), scores, joined, top, normalise, kind)
        packed = pack(ops, each, device, dtype)
        assert (packed.count, packed.inner) == (count, 40)
        got = ops.experts(x.to(device), scores.to(dtype).to(device), packed, top, normalise, kind).cpu()
        error = float((got.float() - want).abs().max() / want.abs().max())
        assert error <= TOLERANCE[dtype], (normalise, error)


@pytest.mark.parametrize(("n", "dtype"), [(7, torch.float32), (20, torch.bfloat16)])
def test_biases_and_the_clamped_activation(
    n: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in gpt-oss; values on both sides of the limits."""
    monkeypatch.setitem(tile_sizes.FORCED, "experts", SMALL)
    count, kind = 5, "clamped_swiglu"
    each, x, scores = weights(count, 40, 72, dtype), (6 * normal(n, 72, seed=n)).to(dtype), scores_of(n, count)
    biases = ExpertBiases(
        [normal(80, seed=i).to(dtype) for i in range(count)], [normal(72, seed=50 + i).to(dtype) for i in range(count)]
    )
    slow, ops = ReferenceOps(), CudaOps()
    wide = ExpertBiases(*([b.float() for b in some] for some in biases))
    joined = pack(slow, each, torch.device("cpu"), torch.float32, wide)
    want = slow.experts(x.float(), scores, joined, 2, True, kind)
    own = ExpertBiases(*([b.to(device) for b in some] for some in biases))
    packed = pack(ops, each, device, dtype, own)
    got = ops.experts(x.to(device), scores.to(dtype).to(device), packed, 2, True, kind).cpu()
    assert (got.float() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize(("kind", "dtype"), [("relu2", torch.float32), ("silu", torch.bfloat16)])
def test_experts_without_gates(
    kind: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares experts without gates, as Nemotron-3 has them, with the reference."""
    monkeypatch.setitem(tile_sizes.FORCED, "experts", SMALL)
    (gate_up, down), x, scores = weights(5, 40, 72, dtype), normal(7, 72, seed=3).to(dtype), scores_of(7, 5)
    each, slow, ops = ([one[40:] for one in gate_up], down), ReferenceOps(), CudaOps()
    want = slow.experts(
        x.float(), scores, pack(slow, each, torch.device("cpu"), torch.float32), 2, True, kind
    )  # fmt: skip
    got = ops.experts(x.to(device), scores.to(device), pack(ops, each, device, dtype), 2, True, kind).cpu()
    assert (got.float() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


PROMPT = tile_sizes.Tile(128, 32, 4, 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tiles_of_prompts_equal_the_reference(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles of pairs and partly filled ones, more of them than follow each other; an expert without any pair."""
    monkeypatch.setitem(tile_sizes.FORCED, "experts", PROMPT)
    each, x, scores = weights(3, 40, 72, dtype), normal(1300, 72, seed=3).to(dtype), scores_of(1300, 3)
    scores[:, 1] = -50.0
    slow, ops = ReferenceOps(), CudaOps()
    want = slow.experts(x.float(), scores, pack(slow, each, torch.device("cpu"), torch.float32), 1, True, "silu")
    got = ops.experts(x.to(device), scores.to(device), pack(ops, each, device, dtype), 1, True, "silu").cpu()
    assert (got.float() - want).abs().max() <= STEP[dtype] * want.abs().max()


STEP = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""One step of a type, of its largest values."""


def test_each_program_has_a_tile_and_a_block_of_its_own(device: torch.device) -> None:
    """Eight tiles take all their blocks before the next eight do; the last ones are fewer."""
    for tiles, blocks in ((1, 1), (3, 5), (8, 4), (21, 3), (16, 1)):
        seen = torch.full((tiles * blocks, 2), -1, dtype=torch.int32, device=device)
        programs_kernel[(tiles * blocks,)](seen, blocks)
        order = [tuple(one) for one in seen.tolist()]
        assert sorted(order) == [(tile, block) for tile in range(tiles) for block in range(blocks)]
        assert [tile // 8 for tile, _ in order] == sorted(tile // 8 for tile, _ in order)
        assert order[: min(8, tiles)] == [(tile, 0) for tile in range(min(8, tiles))]


@triton.jit(do_not_specialize=["blocks"])
def programs_kernel(seen, blocks):
    tile, block = quantised_fused_moe.order_programs(blocks)
    tl.store(seen + 2 * tl.program_id(0), tile)
    tl.store(seen + 2 * tl.program_id(0) + 1, block)


@pytest.mark.parametrize(("tokens", "length"), [(16, "few"), (17, "many"), (64, "many"), (65, "prompt")])
def test_classes_follow_from_pairs_and_experts(tokens: int, length: str) -> None:
    """Tokens of an expert on average -> the class of tiles; on every architecture 16-bit tiles of prompts are
    larger.
    """
    assert fused_moe.length_class(tokens * 128, 128) == length
    for arch in tile_sizes.SHARED:
        for gated in (0, 1):
            many, prompt = (tile_sizes.find("experts", arch, 16, 0, gated, name) for name in ("many", "prompt"))
            assert prompt.m == 128 and prompt.n * prompt.m > many.n * many.m


@pytest.mark.parametrize(("n", "count", "top"), [(1, 4, 4), (3, 5, 1), (5, 40, 10), (16, 256, 8), (16, 3, 2)])
def test_few_tokens_are_routed_in_one_launch(n: int, count: int, top: int, device: torch.device) -> None:
    """The one launch places tokens as the three do, also for scores that are equal, minus infinity or NaN."""
    scores = scores_of(n, count).div(0.5).floor().to(device)
    scores[-1, 0] = torch.nan
    scores[0, 1:] = -torch.inf
    before = interpreter.launches()
    few = fused_moe.route_tokens(scores, top, True, 16)
    middle = interpreter.launches()
    several = fused_moe.route_tokens(scores, top, True, 16, alike=True)
    assert not INTERPRETED or (middle - before, interpreter.launches() - middle) == (1, 3)
    used = few.owner >= 0
    assert torch.equal(few.owner, several.owner)
    assert torch.equal(few.order.view(-1, 16)[used], several.order.view(-1, 16)[used])
    torch.testing.assert_close(few.shares, several.shares, equal_nan=True)


@pytest.mark.parametrize(("n", "count", "top", "tile"), [(1, 6, 2, 16), (33, 6, 6, 16), (300, 9, 4, 32)])
def test_every_pair_has_one_place_in_a_tile_of_its_expert(
    n: int, count: int, top: int, tile: int, device: torch.device
) -> None:
    """Also over several chunks of pairs, and where one expert has them all."""
    scores = scores_of(n, count)
    if n == 300:
        scores[:, 2] = 50.0
    shares, chosen = route_tokens(scores, top, True)
    found = fused_moe.route_tokens(scores.to(device), top, True, tile)
    torch.testing.assert_close(found.shares.cpu(), shares)
    order, owner = found.order.cpu().view(-1, tile), found.owner.cpu().tolist()
    seen = []
    for held, expert in zip(order.tolist(), owner, strict=True):
        if expert >= 0:
            pairs = [p for p in held if p >= 0]
            assert pairs and all(int(chosen.flatten()[p]) == expert for p in pairs)
            assert pairs == held[: len(pairs)] and pairs == sorted(pairs)
            seen += pairs
    assert sorted(seen) == list(range(n * top))
    assert all(expert == -1 for expert in owner[owner.index(-1) :]) if -1 in owner else True


def test_scores_at_the_ends_of_a_type(device: torch.device) -> None:
    """Equal scores take the lower numbers; minus infinity is the last to be taken; a NaN spoils its own row."""
    low, nan = float("-inf"), float("nan")
    scores = torch.tensor([[0.0, 0.0, 0.0], [low, 1.0, low], [nan, 1.0, 2.0]], device=device)
    for found in (fused_moe.route_tokens(scores, 2, True, 16, alike) for alike in (False, True)):
        check_ends(found)


def check_ends(found: fused_moe.Routes) -> None:
    assert found.shares[0].tolist() == [0.5, 0.5] and found.shares[1].tolist() == [1.0, 0.0]
    assert found.shares[2].isnan().all()
    order = found.order.view(-1, 16).cpu()
    pairs = {int(e): sorted(p for p in held.tolist() if p >= 0)
             for e, held in zip(found.owner.cpu(), order, strict=True)}  # fmt: skip
    assert pairs[0][:2] == [0, 3] and 2 in pairs[1]


def test_no_order_of_programs_changes_a_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRETED:
        pytest.skip("the interpreter chooses the order")
    monkeypatch.setitem(tile_sizes.FORCED, "experts", SMALL)
    monkeypatch.setattr(fused_moe, "CHUNK", 16)
    ops = CudaOps()
    w, x, scores = ops.pack_experts(*weights(4, 24, 40, torch.bfloat16)), normal(9, 40).bfloat16(), scores_of(9, 4)
    interpreter.in_all_orders(lambda: ops.experts(x, scores, w, 2, True, "silu"))


def test_a_token_has_the_same_bits_in_any_company(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a class of launches; under ``--batch-invariant`` the class is one, however many tokens there are."""
    lengths: list[str] = []
    kept = tile_sizes.find

    def find(kernel: str, arch: int, bits: int, head: int, group: int, length: str) -> tile_sizes.Tile:
        lengths.append(length)
        assert kept(kernel, arch, bits, head, group, length)
        return SMALL

    monkeypatch.setattr(tile_sizes, "find", find)
    ops = InvariantCudaOps()
    w = pack(ops, weights(3, 24, 40, torch.bfloat16), device, torch.bfloat16)
    x, scores = normal(50, 40).bfloat16().to(device), scores_of(50, 3).to(device)
    whole = ops.experts(x, scores, w, 2, True, "silu")
    for begin, end in ((0, 1), (7, 8), (20, 50)):
        assert torch.equal(ops.experts(x[begin:end], scores[begin:end], w, 2, True, "silu"), whole[begin:end])
    assert set(lengths) == {"many"}
    CudaOps().experts(x[:1], scores[:1], w, 2, True, "silu")
    CudaOps().experts(x, scores, w, 2, True, "silu")
    assert lengths[-4:] == ["few", "few", "many", "many"], "of each launch both products"


def test_room_is_enough_for_any_choice() -> None:
    for pairs, count, tile in ((1, 8, 16), (64, 8, 16), (1000, 3, 64), (128, 128, 16)):
        worst = min(count, pairs) + (pairs - min(count, pairs)) // tile
        assert worst <= fused_moe.tile_capacity(pairs, count, tile) <= pairs


def test_mistakes_of_callers_are_refused(device: torch.device) -> None:
    ops = CudaOps()
    w = pack(ops, weights(3, 24, 40, torch.float32), device, torch.float32)
    x, scores = normal(2, 40).to(device), scores_of(2, 3).to(device)
    for wrong in (
        lambda: ops.experts(x, scores[:, :2], w, 2, True, "silu"), lambda: ops.experts(x, scores, w, 4, True, "silu"),
        lambda: ops.experts(x, scores, w, 2, True, "mish"), lambda: ops.experts(x.half(), scores, w, 2, True, "silu"),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            wrong()
    assert isinstance(w, StackedExperts)
    assert fused_moe.run(x[:0], scores[:0], w, 2, True, "silu").shape == (0, 40)
