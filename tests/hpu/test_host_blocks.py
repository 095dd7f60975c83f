"""KV blocks in host memory on an emulated Gaudi: contents under random delays, waits, recipes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.launches.block_copies import batches
from trencadis.core.device.backend import LayerKV
from trencadis.core.kv_cache_format import SINK_BLOCK
from trencadis.core.launches.host_block_copies import tensors_of
from trencadis.core.step import BlockMove

pytestmark = pytest.mark.part("quantised")

SIZE, BLOCKS, SLOTS = 2, 8, 5


def caches(backend: Any, form: str) -> list[LayerKV]:
    """Flat caches of two layers; those of codes have three kinds of tensors."""

    def made(dtype: torch.dtype, *last: int) -> torch.Tensor:
        return backend.zeros((BLOCKS * SIZE, 2, *last), dtype)  # type: ignore[no-any-return]

    if form != "codes":
        return [LayerKV(made(torch.float32, 4), made(torch.float32, 4)) for _ in "ab"]
    codes, scale = torch.int8, torch.float16
    return [LayerKV(made(codes, 4), made(codes, 4), made(scale), made(scale), made(torch.bfloat16, 2)) for _ in "ab"]


class Blocks:
    """The caches of a backend and its copies, beside what each block and slot must hold: one number.

    ``form``: "plain" or "codes"; or "states", recurrent states of two layers, whose blocks are slots.
    """

    def __init__(self, backend: Any, form: str = "plain", graphs: bool = True) -> None:
        self.backend, self.card = backend, backend.card
        self.size, self.tensors = 1 if form == "states" else SIZE, list[Any]()
        if form == "states":
            self.tensors = [backend.zeros((BLOCKS, *shape), torch.float32) for shape in ((3, 4), (2, 4, 4)) * 2]
            self.copies = backend.state_copies(self.tensors)
        else:
            self.tensors = tensors_of(caches(backend, form))
            self.copies = backend.block_copies(self.tensors)
        self.copies.bind(self.tensors, graphs)
        self.copies.hold(SLOTS)
        self.device, self.host = [0] * BLOCKS, [0] * SLOTS

    def write(self, block: int, number: int) -> None:
        """A later launch of the engine stores another content."""
        at = slice(block * self.size, (block + 1) * self.size)

        def work() -> None:
            for t in self.tensors:
                t.held[at].fill_(number)

        self.card.queue.push(work)
        self.device[block] = number

    def run(self, moves: list[BlockMove]) -> None:
        for block, slot, out in moves:
            if out:
                self.host[slot] = self.device[block]
            else:
                self.device[block] = self.host[slot]
        self.copies.run(moves)

    def check(self) -> None:
        self.backend.synchronize()
        for t in self.tensors:
            found = t.held.float().view(BLOCKS, -1)
            for block in range(BLOCKS):
                if block != SINK_BLOCK:
                    assert (found[block] == self.device[block]).all(), (block, found[block], self.device[block])


def play(blocks: Blocks, seed: int, lists: int = 12) -> None:
    """Random lists of copies between random stores, while the card is as late as it may be."""
    rng = random.Random(seed)
    blocks.card.queue.dice = random.Random(seed)
    real = [n for n in range(BLOCKS) if n != SINK_BLOCK]
    for _ in range(lists):
        for block in rng.sample(real, rng.randint(0, 3)):
            blocks.write(block, rng.randint(1, 100))
        blocks.run(
            [BlockMove(rng.choice(real), rng.randrange(SLOTS), rng.random() < 0.5) for _ in range(rng.randint(1, 7))]
        )
    blocks.check()


@pytest.mark.parametrize(
    ("lazy", "form", "seeds"),
    [
        (True, "plain", 8),
        (True, "codes", 4),
        (True, "states", 4),
        pytest.param(False, "plain", 4, marks=pytest.mark.long),
        pytest.param(False, "states", 4, marks=pytest.mark.long),
        pytest.param(True, "plain", 1000, marks=pytest.mark.long),
    ],
)
def test_blocks_go_out_and_come_back_under_random_delays(
    hpu: Callable[..., Any], lazy: bool, form: str, seeds: int
) -> None:
    """And nothing is compiled, and no copy goes through the driver's memory."""
    blocks = Blocks(hpu(block_size=SIZE, lazy=lazy), form)
    compiled = blocks.card.clock.compiles
    for seed in range(seeds):
        play(blocks, seed)
    assert blocks.card.clock.compiles == compiled and blocks.card.transfers.counts.staged == 0
    assert not blocks.card.clock.lines


def test_without_graphs_the_launches_are_recipes_that_are_known(hpu: Callable[..., Any]) -> None:
    blocks = Blocks(hpu(block_size=SIZE), graphs=False)
    compiled = blocks.card.clock.compiles
    play(blocks, 1)
    assert blocks.card.clock.compiles == compiled and not blocks.card.allocator.used["graphs"]


def test_a_copy_that_waits_for_no_fetch_is_found(hpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(hpu(block_size=SIZE))
    nothing = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(blocks.copies, "_fetched", nothing)
    with pytest.raises(AssertionError):
        for seed in range(10):
            play(blocks, seed)


@pytest.mark.parametrize("said", [False, True])
def test_copies_of_blocks_in_memory_that_is_not_pinned_block(hpu: Callable[..., Any], said: bool) -> None:
    """If that memory was said to be pinned, nothing would wait for them."""
    blocks = Blocks(hpu(block_size=SIZE, pinned=said))
    with pytest.raises(AssertionError) if said else nullcontext():
        for seed in range(10):
            play(blocks, seed)


def test_a_slot_in_the_midst_of_pinned_memory_is_staged(hpu: Callable[..., Any]) -> None:
    """The plug-in knows pinned memory by the address of a tensor's first element."""
    backend = hpu()
    memory, count = backend.bridge.pin(torch.zeros(2, 4)), backend.card.transfers.counts
    for row, staged in ((memory, 0), (memory[:1], 0), (memory[1], 1)):
        torch.zeros(row.shape, device=DEVICE).copy_(row, non_blocking=True)
        assert count.staged == staged


def test_a_block_that_python_cuts_out_is_a_recipe_of_its_own(hpu: Callable[..., Any]) -> None:
    """Outside of launches, in lazy mode: a view elsewhere in the cache is compiled anew."""
    backend = hpu()
    cache, clock = backend.zeros((8, 4), torch.float32), backend.card.clock
    spare, before = backend.zeros((2, 4), torch.float32), backend.card.clock.compiles
    for at in (0, 2, 4, 2):
        torch.add(cache[at : at + 2], spare)
    assert clock.compiles - before >= 3


def test_lists_are_cut_where_a_direction_ends_and_where_a_block_comes_again() -> None:
    a, b = (lambda block: BlockMove(block, 0, True)), (lambda block: BlockMove(block, 0, False))
    moves = [a(2), a(3), b(2), b(3), b(2), *map(a, range(2, 8))]
    assert [[m.block for m in batch] for batch in batches(moves, 4)] == [[2, 3], [2, 3], [2], [2, 3, 4, 5], [6, 7]]
