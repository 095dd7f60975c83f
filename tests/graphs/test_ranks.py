"""Ranks agree on their graphs: whatever fails on one, all capture the same buckets, ask the same, and go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.device import GIB, FakeDevice, OutOfMemory, make_harness, small_plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import ProgramState
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.memory.memory_division import POOLS

BUCKETS = small_plan().buckets
COUNT = len(BUCKETS)
MIB = 1 << 20


class Meeting:
    """Where ranks that are threads meet; a rank that asks when the others do not breaks it."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=20)
        self.said: list[Sequence[int]] = [()] * world

    def least(self, rank: int, values: Sequence[int]) -> tuple[int, ...]:
        self.said[rank] = values
        self.barrier.wait()
        found = tuple(min(column) for column in zip(*self.said, strict=True))
        self.barrier.wait()
        return found


@dataclass
class ThreadComm:
    rank: int
    meeting: Meeting
    asked: list[int] = field(default_factory=list)

    @property
    def world(self) -> int:
        return self.meeting.world

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        self.asked.append(len(values))
        return self.meeting.least(self.rank, values)


Rank = tuple[FakeDevice, GraphManager, GraphCaptures]
Work = Callable[[GraphManager, GraphCaptures], Any]


def together(devices: Sequence[FakeDevice], work: Work, **options: Any) -> list[Rank]:
    """``work`` on each rank in a thread of its own; all must end, after the same questions."""
    meeting = Meeting(len(devices))

    def run(rank: int) -> Rank:
        device = devices[rank]
        device.comm = ThreadComm(rank, meeting)
        try:
            manager, captures = make_harness(device, lazy=work is lazy, **options)
            work(manager, captures)
        except BaseException:
            meeting.barrier.abort()
            raise
        return device, manager, captures

    with ThreadPoolExecutor(len(devices)) as pool:
        ranks = list(pool.map(run, range(len(devices))))
    first = ranks[0]
    for device, manager, captures in ranks:
        assert device.comm.asked == first[0].comm.asked
        assert [manager.state(b) for b in BUCKETS] == [first[1].state(b) for b in BUCKETS]
        assert captures.accounts == first[2].accounts and captures.measured == first[2].measured
        rows = dict(captures.ledger.rows())
        assert sum(rows.values()) == device.size
        assert device.used == device.size - rows["margin"] - rows["graph reserve unused"]
    return ranks


def full(manager: GraphManager, captures: GraphCaptures) -> None:
    Warmup(manager, captures).run_all()


def lazy(manager: GraphManager, captures: GraphCaptures) -> None:
    for bucket in [*BUCKETS, *BUCKETS]:
        manager.run(bucket, None, 1)  # type: ignore[arg-type]


def background(manager: GraphManager, captures: GraphCaptures) -> None:
    warmup = Warmup(manager, captures)
    turns = 0
    while warmup.advance() is not None:
        turns += 1
        manager.run(BUCKETS[turns % COUNT], None, 1)  # type: ignore[arg-type]


MODES = pytest.mark.parametrize("mode", [full, lazy, background])


@MODES
@pytest.mark.parametrize("k", range(1, COUNT + 1))
def test_memory_that_runs_out_on_one_rank_costs_all_of_them_that_graph(mode: Any, k: int) -> None:
    devices = [FakeDevice(), FakeDevice(fails={("capture", k): OutOfMemory()}, leaks=MIB)]
    (one, manager, captures), (_, _, other) = together(devices, mode)
    (lost,) = captures.failed
    assert "on another rank" in captures.failed[lost] and "out of memory" in other.failed[lost]
    assert manager.state(lost) is ProgramState.COMPILED and len(captures.accounts.closed) == 1
    assert ("capture", lost) in one.calls, "it was captured and given up again"


def test_the_dearest_rank_decides_what_the_pools_buy() -> None:
    devices = [FakeDevice(cost=lambda b: MIB), FakeDevice(cost=lambda b: 40 * MIB)]
    (_, _, one), (_, manager, two) = together(devices, full, reserved=0.02)
    assert 0 < len(manager.list_captured()) < COUNT
    assert sum(one.own.spent.values()) < sum(two.own.spent.values()) == sum(two.accounts.spent.values())


def test_the_rank_with_least_memory_decides() -> None:
    devices = [FakeDevice(), FakeDevice(size=6 * GIB, cost=lambda b: 30 * MIB)]
    (_, _, one), (_, manager, two) = together(devices, full, reserved=0.03)
    assert one.accounts.budget == two.accounts.budget and one.memory_split.graphs > two.memory_split.graphs
    assert 0 < len(manager.list_captured()) < COUNT


def test_a_bucket_that_compiles_on_one_rank_only_is_broken_on_all() -> None:
    shaky = Bucket(Stage.FRESH, (1, 128))
    found: list[dict[Bucket, str]] = []

    def work(manager: GraphManager, captures: GraphCaptures) -> None:
        warmup = Warmup(manager, captures)
        warmup.run_all()
        found.append(warmup.broken)

    together([FakeDevice(), FakeDevice(unstable={shaky: 1})], work)
    assert [set(broken) for broken in found] == [{shaky}, {shaky}]


def test_a_rank_of_a_group_does_not_give_graphs_up_by_itself() -> None:
    """The others wait in the launch's collectives: the engine ends and is started again."""
    devices = [FakeDevice(), FakeDevice(fails={("step", 1): OutOfMemory()})]
    meeting = Meeting(2)
    device = devices[1]
    device.comm = ThreadComm(1, meeting)
    device.comm.meeting.least = lambda rank, values: tuple(values)  # type: ignore[method-assign]
    manager, captures = make_harness(device)
    full(manager, captures)
    with pytest.raises(OutOfMemory):
        manager.run(BUCKETS[0], None, 1)  # type: ignore[arg-type]
    assert len(manager.list_captured()) == COUNT


@settings(max_examples=40, deadline=None)
@given(data=st.data(), mode=st.sampled_from([full, lazy, background]))
def test_ranks_agree_whatever_happens(data: st.DataObject, mode: Any) -> None:
    costs = st.lists(st.integers(0, GIB), min_size=COUNT, max_size=COUNT)
    devices = []
    for _ in range(data.draw(st.integers(2, 3))):
        own = dict(zip(BUCKETS, data.draw(costs), strict=True))
        fails = data.draw(st.dictionaries(st.integers(1, COUNT), st.booleans(), max_size=2))
        devices.append(
            FakeDevice(
                size=data.draw(st.sampled_from([12, 16])) * GIB,
                returned=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
                leaks=data.draw(st.integers(0, 1 << 24)),
                cost=own.__getitem__,
                fails={("capture", k): OutOfMemory() if oom else ValueError("no") for k, oom in fails.items()},
            )
        )
    reserved = data.draw(st.sampled_from([0.0, 0.05, 0.3, 0.9]))
    ranks = together(devices, mode, reserved=reserved)
    for _, _, captures in ranks:
        for pool in POOLS:
            assert captures.accounts.spent[pool] >= captures.own.spent[pool]
