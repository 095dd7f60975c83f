"""Products of few rows over oneDNN's panels, and greedy heads without logits: the tokens are those of the logits."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import kernel_kinds
from tests.kernel_kinds import threads
from trencadis.backends.cpu.native import dense_linear, kernel_choice_by_cpu
from trencadis.backends.cpu.native.kernel_choice_by_cpu import TORCH, chosen_table
from trencadis.backends.cpu.ops import CpuOps, PackedWeight, is_packable
from trencadis.core.device.backend import Comm
from trencadis.core.device.communicators_and_rank_agreement import SingleRank
from trencadis.core.models.linear_and_embedding import LAST, LMHead

TYPES = kernel_kinds.dense_types()
pytestmark = pytest.mark.skipif(not TYPES, reason="own kernels do not multiply dense weights on this CPU")
EVERY = pytest.mark.parametrize("dtype", TYPES)
ROWS = (1, 2, 5, 6, 7, 8, 13, 32, 64, 127, 128)
SHAPES = ((64, 32), (65, 34), (127, 96), (200, 130), (448, 1000))


@pytest.fixture(autouse=True, params=kernel_kinds.DENSE_KINDS)
def own_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each kind, whatever kernels serve on this CPU otherwise."""
    kernel_kinds.use(request.param, monkeypatch)
    yield
    kernel_choice_by_cpu._chosen.cache_clear()


def packed(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    made = CpuOps().pack_weight(weight, bias)
    assert isinstance(made, PackedWeight) and made.panels is not None
    return made


def torch_ops() -> CpuOps:
    made = CpuOps()
    made.table = kernel_kinds.table(TORCH)
    return made


@EVERY
def test_products_of_few_rows_are_exact_to_the_last_rounding_and_a_row_depends_on_itself_alone(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(3)
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        wide = torch.randn(max(ROWS), inputs + 4, generator=generator).to(dtype)
        x = wide[:, 2 : 2 + inputs]  # rows with others' values between them
        whole = dense_linear.product(x, packed(weight, bias).panels)  # type: ignore[arg-type]
        exact = x.double() @ weight.double().T + bias.double()
        scale = (x.double().abs() @ weight.double().abs().T + bias.double().abs()).clamp_min(1e-3)
        unit = 2**-8 if dtype == torch.bfloat16 else 2**-23
        error = ((whole.double() - exact).abs() - exact.abs() * unit) / scale
        assert float(error.max()) < 2e-6, (outputs, inputs)
        w = packed(weight, bias)
        for rows, team in zip(ROWS, (1, 3) * len(ROWS), strict=False):
            with threads(team):
                assert torch.equal(CpuOps().linear(x[:rows], w), whole[:rows]), (outputs, inputs, rows)
                assert torch.equal(CpuOps().linear(x[rows - 1 : rows], w), whole[rows - 1 : rows])


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0078125, 3e38, -3e38, 1e-30, math.inf, -math.inf, math.nan])


@EVERY
@given(
    values=st.lists(VALUES, min_size=1, max_size=150), signs=st.lists(st.sampled_from([1.0, -1.0, 0.5]), min_size=1),
    scale=st.sampled_from([1.0, 0.25, 3.0]), less=st.integers(0, 70),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_best_is_the_argmax_with_ties_infinities_and_what_is_no_number(
    dtype: torch.dtype, values: list[float], signs: list[float], scale: float, less: int
) -> None:
    """Inputs (sign, 0, ...) give each weight as a logit; ``less``: outputs at the end that are padding."""
    weight = torch.zeros(150, 32)
    weight[: len(values), 0] = torch.tensor(values)
    x = torch.tensor([[sign, *[0.0] * 31] for sign in signs]).to(dtype)
    w, real = packed(weight.to(dtype)), max(len(values) - less, 1)
    logits = (CpuOps().linear(x, w) * scale)[:, :real]
    codes = CpuOps().best_outputs(x, w, real, scale)
    assert codes is not None
    assert (LAST - (codes & 0xFFFFFFFF)).tolist() == logits.argmax(-1).tolist()


@EVERY
@pytest.mark.parametrize("team", [1, 3])
def test_a_head_takes_the_token_of_its_logits_also_where_many_are_equal(dtype: torch.dtype, team: int) -> None:
    """Small whole weights and inputs make equal logits, of which the first has to be taken, whichever thread has it."""
    generator = torch.Generator().manual_seed(5)
    head = LMHead(CpuOps(), SingleRank(), 5000, 64)
    head.pack(torch.randint(-2, 3, (5000, 64), generator=generator).to(dtype), None)
    for rows in (1, 7, 130, 300):
        x = torch.randint(-1, 2, (rows, 64), generator=generator).to(dtype)
        logits = head(x)
        assert int((logits == logits.amax(-1, keepdim=True)).sum(-1).max()) > 1
        with threads(team):
            found = head.best(x)
        assert found is not None and torch.equal(found, logits.argmax(-1))


class Ranks:
    """Ranks that are threads of this process: each gets what all have."""

    def __init__(self, world: int) -> None:
        self.world, self.parts = world, dict[int, object]()
        self.barrier = threading.Barrier(world, timeout=60)

    def share(self, rank: int, part: object) -> list[object]:
        self.parts[rank] = part
        self.barrier.wait()
        found = [self.parts[i] for i in range(self.world)]
        self.barrier.wait()
        return found


class ThreadComm(SingleRank):
    """``core.device.backend.Comm`` of one of ``Ranks``."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.world = ranks, rank, ranks.world  # type: ignore[misc]

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.ranks.share(self.rank, x), -1)  # type: ignore[arg-type]

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(some) for some in zip(*self.ranks.share(self.rank, values), strict=True))  # type: ignore[arg-type]


def on_ranks(table: Tensor, x: Tensor, unit: int, lacking: int = -1) -> list[tuple[Tensor | None, Tensor]]:
    """What each of three ranks finds by ``best`` and by its logits; ``lacking``: a rank without own kernels."""
    ranks, found = Ranks(3), dict[int, tuple[Tensor | None, Tensor]]()

    class Table:
        def take_quantised(self, *args: object, **kwargs: object) -> None:
            return None

        def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
            return table[start:stop]

    def run(rank: int) -> None:
        comm: Comm = ThreadComm(ranks, rank)
        head = LMHead(torch_ops() if rank == lacking else CpuOps(), comm, len(table), table.shape[1], unit=unit)
        head.load(Table(), "embed_tokens")  # type: ignore[arg-type]
        found[rank] = head.best(x), head(x).argmax(-1)

    team = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for one in team:
        one.start()
    for one in team:
        one.join(60)
    return [found[rank] for rank in range(3)]


@EVERY
@pytest.mark.parametrize(("vocab", "unit"), [(300, 1), (301, 8), (130, 64), (65, 64)])
def test_ranks_take_one_token_from_their_shares_of_the_vocabulary(dtype: torch.dtype, vocab: int, unit: int) -> None:
    """All logits are below zero, so that padding of a share would win; some ranks have nothing but padding."""
    generator = torch.Generator().manual_seed(7)
    table = -torch.randint(1, 3, (vocab, 32), generator=generator).to(dtype)
    x = torch.randint(1, 3, (9, 32), generator=generator).to(dtype)
    found = on_ranks(table, x, unit)
    for best, wanted in found:
        assert best is not None and torch.equal(best, wanted)
    assert all(torch.equal(found[0][1], wanted) for _, wanted in found)


def test_ranks_take_logits_together_where_one_has_no_kernels() -> None:
    table = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    assert [best for best, _ in on_ranks(table, table[:3], 1, lacking=1)] == [None] * 3


@EVERY
def test_a_weight_that_lies_otherwise_keeps_onednns_products(dtype: torch.dtype) -> None:
    if not is_packable(dtype):
        pytest.skip("oneDNN does not multiply this type on this CPU")
    weight = torch.randn(130, 40, generator=torch.Generator().manual_seed(2)).to(dtype)
    table = chosen_table()
    with threads(1):  # with more, oneDNN packs float32 otherwise on a CPU with AVX2 alone
        other, short, same = (torch.ops.mkldnn._reorder_linear_weight(w) for w in (weight.flip(0), weight[:64], weight))
    assert dense_linear.panels_of(other, weight, None, table) is None
    assert dense_linear.panels_of(short, weight, None, table) is None
    mine = dense_linear.panels_of(same, weight, None, table)
    assert (mine is not None) == (dtype in kernel_kinds.shared_types())
