"""Experts of few rows by one call of the library: the sums of the calls one by one, without reading other experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trencadis.backends.cpu.expert_mlp import SeparateExperts, route_tokens, run_chosen_experts
from trencadis.backends.cpu.native import expert_kernels
from trencadis.backends.cpu.native.expert_kernels import ExpertTable, Routing
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable, Op
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import CLAMPED_SWIGLU, ReferenceOps, clamped_swiglu
from trencadis.core.device.backend import ExpertBiases
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import FP4_HALVES, Scheme

COUNT, TOP, HIDDEN, INNER = 8, 3, 96, 160
KINDS = ("silu", CLAMPED_SWIGLU)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distinct(n: int, seed: int) -> Tensor:
    """Scores bfloat16 [n, COUNT] of which no two of a row are equal."""
    return (draw(n, COUNT, seed=seed).argsort(dim=1).float() / 2 - draw(n, 1, seed=seed).abs()).bfloat16()


def make_experts(ops: CpuOps, coded: bool, biased: bool) -> SeparateExperts:
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    biases = None
    if biased:
        gate_up, down = ([draw(one[0], seed=70 + i).bfloat16() for i in range(COUNT)] for one in shapes)
        biases = ExpertBiases(gate_up, down)
    if not coded:
        made = [[(draw(*one, seed=i) * one[1] ** -0.5).bfloat16() for i in range(COUNT)] for one in shapes]
        found: object = ops.pack_experts(made[0], made[1], biases)
    else:
        scheme, halves = Scheme(8, group=32, fp4=True), torch.tensor(FP4_HALVES, dtype=torch.int8)
        codes: list[list[Tensor | QTensor]] = [
            [
                QTensor(
                    scheme, halves[torch.randint(0, 16, one, generator=torch.Generator().manual_seed(i))],
                    torch.full((one[0], one[1] // 32), 2.0**-5), None, 32, None, torch.bfloat16,
                )
                for i in range(COUNT)
            ]
            for one in shapes
        ]  # fmt: skip
        found = ops.pack_quantised_experts(codes[0], codes[1], biases)
    assert isinstance(found, SeparateExperts)
    return found


@pytest.fixture
def ops() -> CpuOps:
    made = CpuOps()
    if (Op.ROWWISE, "bfloat16") not in made.table.rows:
        pytest.skip("this CPU has no kernels for rows of 16-bit values")
    return made


def run(x: Tensor, scores: Tensor, table: ExpertTable | None, routing: Routing, kernels: KernelTable) -> Tensor:
    """``run_few`` of rows that the library takes."""
    made = expert_kernels.run_few(x, scores, table, routing, kernels)
    assert made is not None
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_one_call_gives_the_bits_of_the_calls(
    ops: CpuOps, coded: bool, biased: bool, normalise: bool, kind: str
) -> None:
    w = make_experts(ops, coded, biased)
    for n in (1, 2, 5, 16):
        x, scores = draw(n, HIDDEN, seed=n).bfloat16(), distinct(n, seed=90 + n)
        routing = Routing(TOP, normalise, kind)
        assert w.table is not None and expert_kernels.takes(x, scores, w.table, routing, ops.table)
        wanted = run_chosen_experts(ops, x, scores, w, TOP, normalise, kind)
        found = run(x, scores, w.table, routing, ops.table)
        # Shares may differ in the last bit of float32, which moves a few values by one bit of bfloat16.
        assert (found != wanted).float().mean() < 0.02, n
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
        assert torch.equal(ops.experts(x, scores, w, TOP, normalise, kind), found)
        for row in range(n):
            alone = run(x[row : row + 1], scores[row : row + 1], w.table, routing, ops.table)
            assert torch.equal(alone[0], found[row]), "a row's bits do not depend on the others"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_are_equal_or_no_numbers_stay_inside(ops: CpuOps, dtype: torch.dtype) -> None:
    """Of equal scores the first are taken; a NaN makes that row alone NaN."""
    w, x = make_experts(ops, True, False), draw(3, HIDDEN).bfloat16()
    assert w.table is not None
    scores = torch.zeros(3, COUNT, dtype=dtype)
    scores[1, 2], scores[2, 4] = float("nan"), float("inf")
    made = run(x, scores, w.table, Routing(TOP, True, CLAMPED_SWIGLU), ops.table)
    ranked = torch.zeros(1, COUNT).index_fill(1, torch.arange(TOP), 1.0)
    wanted = run_chosen_experts(ops, x[:1], ranked, w, TOP, True, CLAMPED_SWIGLU)
    torch.testing.assert_close(made[:1], wanted, rtol=0.02, atol=0.02)
    assert made[0].isfinite().all() and made[1].isnan().all() and made[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_scores_decoding_a_prompt_and_the_reference_take_the_first(ops: CpuOps, dtype: torch.dtype) -> None:
    """A router whose rows repeat: a tie takes the same experts in one row, in many, and in the reference op."""
    n, plain = 4 * expert_kernels.MOST_ROWS, ReferenceOps()
    gate_up = [(draw(2 * INNER, HIDDEN, seed=i) * HIDDEN**-0.5).bfloat16() for i in range(COUNT)]
    down = [(draw(HIDDEN, INNER, seed=50 + i) * INNER**-0.5).bfloat16() for i in range(COUNT)]
    router, x = draw(3, HIDDEN, seed=1)[torch.tensor([0, 1, 0, 2, 1, 0, 2, 1])], draw(n, HIDDEN, seed=2).bfloat16()
    scores = (x.float() @ router.t() / 8).to(dtype)
    assert all(len(row.unique()) <= 3 for row in scores), "the scores that repeated rows give are equal"
    taken = torch.tensor([sorted(range(COUNT), key=lambda e: -float(row[e]))[:TOP] for row in scores])  # stable
    assert torch.equal(route_tokens(scores, TOP, True).experts, taken)
    few, many = ops.pack_experts(gate_up, down), plain.pack_experts(gate_up, down)
    assert isinstance(few, SeparateExperts)
    prompt = ops.experts(x, scores, few, TOP, True, "silu")
    torch.testing.assert_close(prompt, plain.experts(x, scores, many, TOP, True, "silu"), rtol=0.05, atol=0.05)
    for row in range(n):
        decoded = run(x[row : row + 1], scores[row : row + 1], few.table, Routing(TOP, True, "silu"), ops.table)
        torch.testing.assert_close(decoded[0], prompt[row], rtol=0.02, atol=0.02)


def test_scores_beyond_the_exactness_of_their_shares_are_ranked_by_themselves() -> None:
    """Shares of such experts are equal, or zero; the scores are not. Both zeros are one score."""
    far = torch.tensor([[-200.0, -150.0, 0.0, -120.0]])
    assert route_tokens(far, 3, False).experts.tolist() == [[2, 3, 1]]
    near = torch.tensor([[9.0, 9.0 + 2**-20, 9.0, -1.0], [-0.0, 0.0, -1.0, -0.0]])
    assert route_tokens(near, 3, False).experts.tolist() == [[1, 0, 2], [0, 1, 3]]
    ends = torch.tensor([[float("-inf"), 3.4e38, float("-inf"), -3.4e38]], dtype=torch.float32)
    assert route_tokens(ends, 3, False).experts.tolist() == [[1, 3, 0]]
    assert route_tokens(torch.tensor([[1.0, float("nan"), 2.0]]), 2, True).shares.isnan().all()


def test_experts_that_no_row_takes_are_not_read(ops: CpuOps) -> None:
    w = make_experts(ops, False, False)
    x, scores = draw(2, HIDDEN).bfloat16(), torch.full((2, COUNT), -9.0)
    scores[0, [1, 2, 6]] = scores[1, [2, 6, 7]] = 1.0
    table = w.table
    assert table is not None
    wanted = run(x, scores, table, Routing(TOP, True, "silu"), ops.table)
    for unread in {*range(COUNT)} - {1, 2, 6, 7}:
        table.gate_up[unread] = table.down[unread] = None
    assert torch.equal(run(x, scores, table, Routing(TOP, True, "silu"), ops.table), wanted)


def test_other_experts_are_left_to_torch(ops: CpuOps) -> None:
    w, x = make_experts(ops, False, False), draw(2, HIDDEN).bfloat16()
    scores, table = draw(2, COUNT), w.table
    assert table is not None and expert_kernels.takes(x, scores, table, Routing(TOP, True, "silu"), ops.table)
    assert not expert_kernels.takes(x, scores, table, Routing(TOP, True, "gelu_pytorch_tanh"), ops.table)
    assert not expert_kernels.takes(x.float(), scores, table, Routing(TOP, True, "silu"), ops.table)
    assert not expert_kernels.takes(x.repeat(9, 1), scores, table, Routing(TOP, True, "silu"), ops.table)
    plain = ops.pack_experts([draw(INNER, HIDDEN).bfloat16()] * 2, [draw(HIDDEN, INNER).bfloat16()] * 2)
    assert isinstance(plain, SeparateExperts) and plain.table is None, "experts without gates"


def test_the_clamped_activation_is_that_of_float32(ops: CpuOps) -> None:
    x = (draw(7, 2 * 52) * 6).bfloat16()
    wanted = clamped_swiglu(*x.float().chunk(2, dim=1)).bfloat16()
    torch.testing.assert_close(ops.act_mul(x, CLAMPED_SWIGLU), wanted, rtol=0.008, atol=1e-6)
