"""Graphs on a scripted device: what is captured, what failures cost, and that the books add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.device import GIB, FakeDevice, OutOfMemory, make_harness, small_plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device.backend import ProgramState
from trencadis.core.errors import StartupError
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.graphs.warmup import Warmup
from trencadis.core.memory.memory_division import POOLS, pool_of

COUNT = len(small_plan().buckets)
MIB = 1 << 20


def warm(manager: GraphManager, captures: GraphCaptures, **options: Any) -> Warmup:
    """A full warm-up."""
    warmup = Warmup(manager, captures, **options)
    warmup.run_all()
    return warmup


def check_books(device: FakeDevice, captures: GraphCaptures) -> None:
    """Rows sum to the device; what they say is used is what the device says."""
    rows = dict(captures.ledger.rows())
    assert sum(rows.values()) == device.size
    assert device.used == device.size - rows["margin"] - rows["graph reserve unused"]


def test_everything_is_compiled_captured_and_replayed() -> None:
    device = FakeDevice()
    manager, captures = make_harness(device)
    warmup = warm(manager, captures)
    assert len(manager.list_captured()) == COUNT and not warmup.broken
    assert [k for k, _ in device.calls] == ["compile"] * COUNT + ["capture"] * COUNT + ["rehearse"] * COUNT
    assert manager.recompiles == manager.lazy_compiles == 0
    check_books(device, captures)
    _, stats = manager.run(Bucket(Stage.DECODE, (1, 2)), None, 1)  # type: ignore[arg-type]
    assert (stats.state, stats.planned, stats.padded) == ("CAPTURED", True, 1)


@pytest.mark.parametrize("k", range(1, COUNT + 1))
@pytest.mark.parametrize("leaks", [0, 3 * MIB])
def test_out_of_memory_in_capture_closes_the_pool_and_goes_on(k: int, leaks: int) -> None:
    device = FakeDevice(fails={("capture", k): OutOfMemory()}, leaks=leaks)
    manager, captures = make_harness(device)
    warm(manager, captures)
    (failed,) = captures.failed
    assert len(captures.accounts.closed) == 1 and manager.state(failed) is ProgramState.COMPILED
    assert all(manager.state(b) >= ProgramState.COMPILED for b in manager.planned)
    assert sum(captures.accounts.lost.values()) == leaks
    check_books(device, captures)
    manager.run(failed, None, 1)  # type: ignore[arg-type]
    assert manager.lazy_compiles == manager.recompiles == 0


def test_another_failure_costs_one_graph_only() -> None:
    device = FakeDevice(fails={("capture", 4): ValueError("no such kernel")})
    manager, captures = make_harness(device)
    warm(manager, captures)
    assert len(manager.list_captured()) == COUNT - 1 and not captures.accounts.closed
    assert "ValueError: no such kernel" in captures.failed.values()


@pytest.mark.parametrize("returned", [0.0, 0.5, 1.0])
def test_a_capture_above_its_pool_is_rolled_back(returned: float) -> None:
    dear = Bucket(Stage.VISION, (256,))
    device = FakeDevice(returned=returned, cost=lambda b: 4 * GIB if b == dear else MIB)
    manager, captures = make_harness(device)
    warm(manager, captures)
    assert manager.state(dear) is ProgramState.COMPILED
    assert [c for c in device.calls if c == ("capture", dear)] == [("capture", dear)]
    assert captures.accounts.lost["vision"] == int(4 * GIB * (1 - returned))
    check_books(device, captures)
    if returned == 1.0:
        assert len(manager.list_captured()) == COUNT - 1


def test_the_budget_decides_who_is_captured_and_nobody_is_left_uncompiled() -> None:
    device = FakeDevice()
    manager, captures = make_harness(device, reserved=0.0005)
    warm(manager, captures)
    assert 0 < len(manager.list_captured()) < COUNT
    assert all(manager.state(b) >= ProgramState.COMPILED for b in manager.planned)
    assert "VLLM_GRAPH_RESERVED_MEM=0.01 holds the plan" in captures.advice()[0]
    check_books(device, captures)


@pytest.mark.parametrize("reserved", [0.1, 0.0005])
def test_learned_shapes_may_take_the_pools_or_as_much_as_the_first_plan(reserved: float) -> None:
    """Graphs that a pool has no room for run compiled, so a full pool is no reason to learn fewer shapes."""
    manager, captures = make_harness(FakeDevice(), reserved=reserved)
    warm(manager, captures)
    budget = captures.accounts.budget
    for stages, limit in captures.list_learned_pools():
        pools = {pool_of(stage) for stage in stages}
        first = sum(p.alone for p in captures.prices if p.bucket.stage in stages)
        heads = sum(
            p.alone for p in captures.prices if p.bucket.stage is Stage.SAMPLE and pool_of(Stage.SAMPLE) in pools
        )
        room = sum(budget[pool] for pool in pools) - heads
        assert limit == max(room, first) and (room > first) == (reserved == 0.1)


def test_leftovers_go_to_the_pool_with_most_gain_per_byte() -> None:
    """Text alone is too small for its graphs; what images and decoding leave pays for them."""
    device = FakeDevice(cost=lambda b: 40 * MIB if b.stage is Stage.FRESH else MIB)
    manager, captures = make_harness(device, price=device.cost, reserved=0.03)
    assert captures.memory_split.text < 40 * MIB * 3
    warm(manager, captures)
    assert len(manager.list_captured()) == COUNT
    check_books(device, captures)


def test_eager_captures_nothing_and_compiles_everything() -> None:
    device = FakeDevice()
    manager, captures = make_harness(device, eager=True)
    warm(manager, captures)
    assert not manager.list_captured() and all(manager.state(b) is ProgramState.COMPILED for b in manager.planned)
    check_books(device, captures)


def test_a_device_without_graphs_is_asked_once() -> None:
    device = FakeDevice(graphs=False)
    manager, captures = make_harness(device)
    warm(manager, captures)
    assert [k for k, _ in device.calls].count("capture") == 1 and captures.unavailable


def test_the_journal_is_told_before_and_after_and_skips_what_killed_an_engine() -> None:
    reported: list[tuple[str, bool]] = []
    device = FakeDevice(fails={("capture", 2): OutOfMemory()})
    manager, captures = make_harness(device, tell=lambda *entry: reported.append(entry))
    warm(manager, captures)
    assert reported[::2] == [(bucket, True) for bucket, _ in reported[::2]]
    assert reported[1::2] == [(bucket, False) for bucket, _ in reported[::2]]
    name = reported[0][0]
    device = FakeDevice()
    manager, captures = make_harness(device, skip=[name])
    warm(manager, captures)
    assert {str(b) for b in manager.planned} - {str(b) for b in manager.list_captured()} == {name}
    assert ("compile", next(b for b in manager.planned if str(b) == name)) in device.calls


def test_a_bucket_that_compiles_again_is_named_and_strict_ends_the_start() -> None:
    shaky = Bucket(Stage.FRESH, (1, 128))
    device = FakeDevice(unstable={shaky: 2})
    manager, captures = make_harness(device)
    warmup = warm(manager, captures)
    assert warmup.broken == {shaky: "2 recipes are compiled again"} and manager.recompiles == 2
    device = FakeDevice(unstable={shaky: 2})
    with pytest.raises(StartupError, match=r"--strict-warmup: 1 of 10 buckets fail, fresh\[1x128\]"):
        warm(*make_harness(device), strict=True)


def test_skipped_warmup_captures_at_first_use_and_says_once_what_would_hold_the_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = FakeDevice()
    manager, captures = make_harness(device, price=lambda b: 2 * MIB, reserved=0.0005, lazy=True)
    for bucket in sorted(manager.planned):
        manager.run(bucket, None, 1)  # type: ignore[arg-type]
        manager.run(bucket, None, 1)  # type: ignore[arg-type]
    manager.count_recompiles()
    assert manager.lazy_compiles == COUNT and manager.recompiles == 0
    assert caplog.text.count("holds the plan") == 1
    check_books(device, captures)


def test_a_small_graph_is_not_priced_like_a_larger_one_that_came_first() -> None:
    """Launches come in any order: after the largest bucket its pool has room for the smallest, and for that alone."""
    device = FakeDevice(cost=lambda b: math.prod(b.dims) * MIB)
    manager, captures = make_harness(device, price=device.cost, reserved=0.1, lazy=True)
    large, small = Bucket(Stage.FRESH, (1, 256)), Bucket(Stage.FRESH, (1, 64))
    captures.accounts.budget["text"] = (256 + 80) * MIB
    for bucket in (large, Bucket(Stage.FRESH, (1, 128)), small):
        manager.run(bucket, None, 1)  # type: ignore[arg-type]
    assert (
        manager.list_captured() == [large, small]
        and captures.missing_reason(Bucket(Stage.FRESH, (1, 128))) == "pool_full"
    )
    check_books(device, captures)


def test_background_takes_the_hottest_first_one_piece_at_a_time() -> None:
    device = FakeDevice()
    manager, captures = make_harness(device)
    warmup = Warmup(manager, captures)
    hot = Bucket(Stage.FRESH, (1, 256))
    for _ in range(3):
        manager.run(hot, None, 1)  # type: ignore[arg-type]
    assert manager.lazy_compiles == 1
    device.calls.clear()
    while warmup.advance() is not None:
        assert len(device.calls) <= 1 or device.calls[-1] != device.calls[-2]
    assert device.calls[0] == ("capture", hot)
    assert len(manager.list_captured()) == COUNT and warmup.state.phase == "warm"
    assert [k for k, _ in device.calls].count("compile") == COUNT - 1
    check_books(device, captures)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_out_of_memory_in_a_step_gives_a_graph_up_and_runs(k: int) -> None:
    device = FakeDevice(fails={("step", k): OutOfMemory()}, returned=1.0)
    manager, captures = make_harness(device)
    warm(manager, captures)
    for bucket in sorted(manager.planned):
        manager.run(bucket, None, 1)  # type: ignore[arg-type]
    captures.observe()
    assert len(manager.list_captured()) == COUNT - 1 and manager.lazy_compiles == 0
    check_books(device, captures)


def test_a_shape_outside_the_plan_is_counted_and_never_captured() -> None:
    device = FakeDevice()
    manager, captures = make_harness(device)
    warm(manager, captures)
    for size in range(300, 330):
        _, stats = manager.run(Bucket(Stage.VISION, (size,)), None, size)  # type: ignore[arg-type]
        assert not stats.planned and stats.state == "COMPILED"
    assert manager.lazy_compiles == 30 and len(manager.list_captured()) == COUNT


COSTS = st.integers(0, 3 * GIB)


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(COSTS, min_size=COUNT, max_size=COUNT),
    prices=st.lists(COSTS, min_size=COUNT, max_size=COUNT),
    returned=st.sampled_from([0.0, 0.3, 1.0]),
    fails=st.sets(st.integers(1, COUNT), max_size=3),
    leaks=st.integers(0, 1 << 24),
    reserved=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    utilisation=st.sampled_from([0.3, 0.9, 1.0]),
)
def test_books_add_up_whatever_happens(
    costs: list[int], prices: list[int], returned: float, fails: set[int], leaks: int, reserved: float,
    utilisation: float,
) -> None:  # fmt: skip
    buckets = small_plan().buckets
    real, said = dict(zip(buckets, costs, strict=True)), dict(zip(buckets, prices, strict=True))
    device = FakeDevice(
        returned=returned, cost=real.__getitem__, leaks=leaks, fails={("capture", k): OutOfMemory() for k in fails}
    )
    manager, captures = make_harness(device, price=said.__getitem__, reserved=reserved, utilisation=utilisation)
    warm(manager, captures)
    check_books(device, captures)
    assert all(manager.state(b) >= ProgramState.COMPILED for b in buckets)
    for pool in POOLS:
        held = [b for b in manager.list_captured() if pool_of(b.stage) == pool]
        assert captures.accounts.spent[pool] == sum(real[b] for b in held)
