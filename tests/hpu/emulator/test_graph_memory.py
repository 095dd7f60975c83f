"""What an emulated graph keeps with and without the tensor cache, and where memory lies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trencadis.backends.hpu.emulator.allocator import ALIGNMENT, AddressSpace
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import Profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import bridge, make_bridge, use
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import EmulatedOutOfMemory
from trencadis.backends.hpu.emulator.emulated_hpu_graphs import wrap

pytestmark = pytest.mark.part("gaudi")

KIB, MIB = 1 << 10, 1 << 20


class Cuts(nn.Module):
    """[n] float32 -> [n]: ``first`` crosses both cuts, ``second`` one, ``gone`` none; the output is made after them."""

    def __init__(self, cut: Callable[[], None]) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        first = x * 2
        gone = first + 1
        del gone
        self.cut()
        second = first + x
        self.cut()
        return first + second


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize("off", [False, True])
def test_a_graph_keeps_what_crosses_its_cuts_once(off: bool, computes: bool) -> None:
    card = use(EmulatedDevice(Profile("card", 64 * MIB), computes))
    x = torch.ones(1000).to(DEVICE)
    graph: Any = wrap(card, Cuts(card.cut), disable_tensor_cache=off)
    out = graph.forward(x)
    assert card.allocator.used["graphs"] == card.profile.graph_bytes + 4000 + (0 if off else 8000)
    for value in (1.0, 3.0):
        x.copy_(torch.full((1000,), value))
        again = graph.forward(x)
        assert again is out, "marked outputs are the same tensors at every replay"
        assert not computes or out.cpu()[:2].tolist() == [5 * value] * 2
    graph.clear_cache()
    assert card.allocator.used["graphs"] == 0


def test_what_a_collective_leaves_stays_without_the_cache() -> None:
    card = use(EmulatedDevice(Profile("card", 64 * MIB), computes=False))
    made = make_bridge(card, cached=False)

    class Summed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            card.cut()
            return made.all_reduce(y) + 1

    made.wrap_in_hpu_graph(Summed()).forward(torch.ones(1000).to(DEVICE))
    assert card.allocator.used["graphs"] == card.profile.graph_bytes + 4000 + 4000


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_gathered_stays_beside_its_rows(cached: bool) -> None:
    """The card's tensor of all ranks, of which rows beside rows are a copy; with the cache its source too."""
    card = use(EmulatedDevice(Profile("card", 64 * MIB), computes=False))
    made = make_bridge(card, cached=cached)

    class Gathered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            card.cut()
            return made.all_gather(y, 2)

    out = made.wrap_in_hpu_graph(Gathered()).forward(torch.ones(10, 100).to(DEVICE))
    assert tuple(out.shape) == (10, 200)
    assert card.allocator.used["graphs"] == card.profile.graph_bytes + 8000 + 8000 + (4000 if cached else 0)


@pytest.mark.parametrize(("text", "cached"), [("", True), ("0", True), ("true", True), ("1", False)])
def test_the_plug_ins_variable(text: str, cached: bool) -> None:
    made = bridge({"PT_HPUGRAPH_DISABLE_TENSOR_CACHE": text})
    x, graph = torch.ones(256 * KIB).to(DEVICE), made.wrap_in_hpu_graph(Cuts(made.mark_step))
    graph.forward(x, bypass_hpu_graphs=True)
    before = made.mem_get_info()[0]
    graph.forward(x)
    took = before - made.mem_get_info()[0]
    assert (3 if cached else 1) * MIB < took < (3 if cached else 1) * MIB + 64 * KIB


# Where it lies


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * ALIGNMENT)), max_size=60), st.booleans())
def test_pieces_never_overlap_and_nothing_is_lost(events: list[tuple[bool, int]], moves: bool) -> None:
    pool = AddressSpace(200 * ALIGNMENT, moves)
    held: list[int] = []
    for give, count in events:
        if give and held:
            pool.release(held.pop(count % len(held)))
        elif (piece := pool.allocate(count)) is not None:
            held.append(piece)
        spans = sorted(pool._pieces[p] for p in held) + [(pool._floor, 0)]
        assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(spans))
        used = sum(size for _, size in spans)
        assert used + sum(pool._holes.values()) == pool._floor
        if moves:
            assert pool.allocate(pool._floor - used + 1) is None, "more than is free"
    for piece in held:
        pool.release(piece)
    assert pool.largest == pool.total


@pytest.mark.parametrize("moves", [True, False])
def test_free_bytes_that_lie_apart(moves: bool) -> None:
    """They are moved together, which is counted; where that is forbidden, the refusal names the largest piece."""
    card = use(EmulatedDevice(Profile("card", 16 * MIB, moves=moves)))
    held = [torch.ones(256 * KIB).to(DEVICE) for _ in range(16)]
    del held[::2]
    if moves:
        torch.ones(1024 * KIB).to(DEVICE)
        assert card.allocator.pool.defragmentations == 1
    else:
        with pytest.raises(EmulatedOutOfMemory, match=f"{8 * MIB} are free, the largest piece of them {MIB}"):
            torch.ones(1024 * KIB).to(DEVICE)


def test_a_workspace_grows_into_what_lies_below_it() -> None:
    """What lies elsewhere does not serve: a graph's capture fails beside free memory, and nothing is charged."""
    card = use(EmulatedDevice(Profile("card", 16 * MIB, moves=False)))
    low, high = torch.ones(2048 * KIB).to(DEVICE), torch.ones(1792 * KIB).to(DEVICE)
    graph: Any = wrap(card, Cuts(card.cut))
    del low
    with pytest.raises(EmulatedOutOfMemory, match="a workspace of"):
        graph.forward(high)
    assert card.allocator.used["graphs"] == card.allocator.used["workspace"] == 0 and card.scope is None
