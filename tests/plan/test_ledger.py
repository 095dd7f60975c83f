"""A device's memory as a ledger that sums to the byte, and what its graph pools buy."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.errors import StartupError
from trencadis.core.memory.graph_selection import (
    GraphPrice,
    affordable_graphs,
    can_pay,
    exhausted_line,
    may_start,
    order_prices,
    predict_bytes,
    reserve_that_holds,
    select_graphs,
    set_cost,
)
from trencadis.core.memory.memory_division import (
    POOLS,
    DeviceTooSmall,
    GraphSettings,
    Ledger,
    MemoryInUse,
    MemorySplit,
    PoolAccounts,
    check_capacity,
    divide_memory,
    final_ledger,
    share_of,
    unused_line,
    usable_bytes,
    utilisation_that_fits,
)

GB = 10**9


def test_the_guides_100_gb_example() -> None:
    """usable 100 GB, reserved 0.1, prompt 0.2, multimodal 0.3."""
    d = divide_memory(MemoryInUse(100 * GB), 1.0, "free", GraphSettings(0.1, 0.2, 0.3), 1, multimodal=True)
    assert (d.usable, d.graphs, d.kv) == (100 * GB, 10 * GB, 90 * GB)
    assert (d.text + d.vision, d.decode) == (2 * GB, 8 * GB)
    assert (d.text, d.vision) == (600 * 10**6, 1400 * 10**6)


def test_a_text_model_has_no_vision_pool() -> None:
    d = divide_memory(MemoryInUse(100 * GB), 1.0, "free", GraphSettings(0.1, 0.2, 0.3), 1, multimodal=False)
    assert (d.text, d.vision, d.decode) == (2 * GB, 0, 8 * GB)


def test_eager_reserves_nothing() -> None:
    d = divide_memory(MemoryInUse(100 * GB), 1.0, "free", GraphSettings(0.4, eager=True), 1, multimodal=True)
    assert (d.graphs, d.kv, d.decode) == (0, 100 * GB, 0)


def test_both_meanings_of_utilisation() -> None:
    before = MemoryInUse(100 * GB, others=GB, weights=15 * GB, activations=4 * GB)
    assert usable_bytes(before, 0.5, "free") == 40 * GB
    assert usable_bytes(before, 0.5, "total") == 30 * GB
    assert usable_bytes(before, 0.1, "total") == 0


SIZES = st.integers(0, 20 << 30)
BEFORE = st.builds(MemoryInUse, st.integers(60 << 30, 140 << 30), *(SIZES.map(lambda n: n // 8) for _ in range(7)))
RATIO = st.integers(0, 1000).map(lambda n: n / 1000)
SETTINGS = st.builds(GraphSettings, RATIO.map(lambda r: min(r, 0.99)), RATIO, RATIO, eager=st.booleans())


EVENTS = st.lists(
    st.tuples(st.sampled_from(POOLS), st.integers(0, 4 << 30), st.booleans(), st.integers(0, 100)), max_size=30
)
"""(pool, bytes of a capture, released afterwards, percent that came back)"""

OF = st.sampled_from(["free", "total"])


@given(BEFORE, st.integers(1, 100), OF, SETTINGS, st.integers(1, 64 << 20), st.booleans(), EVENTS)
def test_rows_sum_to_the_device(
    before: MemoryInUse, percent: int, of: str, settings: GraphSettings, block: int, multimodal: bool,
    events: list[tuple[str, int, bool, int]],
) -> None:  # fmt: skip
    d = divide_memory(before, percent / 100, of, settings, block, multimodal)
    assert d.text + d.vision + d.decode == d.graphs and d.kv % block == 0 and d.kv + d.graphs <= d.usable
    assert sum(n for _, n in Ledger(before, d).rows()) == before.total
    books = PoolAccounts(d.pools())
    for pool, cost, released, back in events:
        fits = books.charge(pool, cost)
        if released or not fits:
            books.release(pool, cost, cost * back // 100)
        assert books.remaining(pool) >= 0
        ledger = final_ledger(before, d, books)
        rows = dict(ledger.rows())
        assert sum(rows.values()) == before.total and rows["graph reserve unused"] >= 0
        held = sum(books.spent.values()) + sum(books.lost.values())
        if held <= d.graphs:
            assert rows["margin"] >= before.free - d.usable, "only rounding goes to the margin"
    books.hand_over("decode")
    assert sum(books.budget.values()) == d.graphs


def test_shares_are_exact_decimals() -> None:
    assert share_of(10, 0.3) == 3 and share_of(10**18, 0.1) == 10**17
    assert share_of(7 * 2**70, 0.29) == 7 * 2**70 * Fraction(29, 100) // 1


def test_overdrawn_and_closed_pools_pay_nothing() -> None:
    books = PoolAccounts({"text": 100, "vision": 50, "decode": 0})
    assert books.charge("text", 80) and not books.charge("text", 30)
    books.release("text", 30, 10)
    assert books.lost["text"] == 20 and books.remaining("text") == 0
    books.close("vision")
    assert books.remaining("vision") == 0
    books.hand_over("decode")
    assert books.budget == {"text": 100, "vision": 0, "decode": 50}


def test_what_comes_back_late_is_no_longer_lost() -> None:
    """Of whatever pool: a device may keep the memory of graphs until the last one is given up."""
    books = PoolAccounts(dict.fromkeys(POOLS, 100))
    for pool, cost in (("text", 60), ("vision", 40), ("decode", 30)):
        books.charge(pool, cost)
    books.release("text", 60, 0)
    books.release("vision", 40, 0)
    assert books.lost == {"text": 60, "vision": 40, "decode": 0} and books.remaining("text") == 40
    books.release("decode", 30, 120)
    assert sum(books.lost.values()) == 10 and not any(books.spent.values())
    books.charge("text", 20)
    books.release("text", 20, 1000)
    assert not any(books.lost.values())


def test_a_run_that_cannot_fit_is_refused_with_a_setting_that_does() -> None:
    before = MemoryInUse(96 << 30, weights=40 << 30, activations=6 << 30)
    block = 32 << 20
    with pytest.raises(StartupError, match=r"--gpu-memory-utilization \d") as error:
        check_capacity(before, 0.05, "free", GraphSettings(), block, True, 256, 32768)
    fits = float(re.findall(r"utilization (\d\.\d+) fits", str(error.value))[0])
    assert fits == utilisation_that_fits(before, "free", GraphSettings(), block, True, 256)
    assert check_capacity(before, fits, "free", GraphSettings(), block, True, 256, 32768).blocks >= 256
    assert divide_memory(before, fits - 0.01, "free", GraphSettings(), block, True).blocks < 256


def test_no_utilisation_fits() -> None:
    before = MemoryInUse(96 << 30, weights=90 << 30)
    with pytest.raises(DeviceTooSmall, match="at most") as error:
        check_capacity(before, 0.9, "free", GraphSettings(), 1 << 30, True, 256, 32768)
    assert check_capacity(before, 1.0, "free", GraphSettings(), 1 << 30, True, error.value.blocks, 1).blocks > 0
    with pytest.raises(DeviceTooSmall, match="before the KV cache"):
        check_capacity(MemoryInUse(96 << 30, weights=97 << 30), 0.9, "free", GraphSettings(), 1, True, 1, 1)


# What a budget buys


def price(stage: Stage, dims: tuple[int, ...], own: int, workspace: int = 0, gain: float = 1.0) -> GraphPrice:
    return GraphPrice(Bucket(stage, dims), own, workspace, gain)


def test_strategies() -> None:
    grid = [price(Stage.FRESH, (r, t), 1) for r in (1, 2, 4) for t in (64, 128)]
    assert [p.bucket.dims for p in order_prices(grid, "min_tokens")] == [
        (1, 64),
        (2, 64),
        (1, 128),
        (4, 64),
        (2, 128),
        (4, 128),
    ]
    assert [p.bucket.dims for p in order_prices(grid, "max_bs")] == [
        (4, 64),
        (4, 128),
        (2, 64),
        (2, 128),
        (1, 64),
        (1, 128),
    ]
    decode = [price(Stage.DECODE, (r, k), 1) for r in (1, 8) for k in (8, 16)]
    assert [p.bucket.dims for p in order_prices(decode, "max_bs")] == [(8, 8), (8, 16), (1, 8), (1, 16)]
    assert [p.bucket.dims for p in order_prices(decode, "min_tokens")] == [(1, 8), (1, 16), (8, 8), (8, 16)]


def test_one_that_is_too_dear_is_passed_over() -> None:
    prices = [price(Stage.VISION, (64,), 10), price(Stage.VISION, (128,), 500), price(Stage.VISION, (192,), 20)]
    assert [p.own for p in affordable_graphs(prices, 40, "min_tokens", "sum")] == [10, 20]


def test_sum_and_max_rules() -> None:
    prices = [price(Stage.DECODE, (r,), 10, 100) for r in (1, 2, 4)]
    assert set_cost(prices, "sum") == 330 and set_cost(prices, "max") == 130
    assert (
        len(affordable_graphs(prices, 143, "max_bs", "sum")) == 1
        and len(affordable_graphs(prices, 143, "max_bs", "max")) == 3
    )


ITEMS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(0, 60)), unique_by=lambda t: t[:2], max_size=40
)
"""(stage, own bytes and size, workspace)"""


@given(ITEMS, st.integers(0, 2000), st.sampled_from(["sum", "max"]), RATIO, RATIO)
def test_winners_never_overdraw_and_leftovers_are_spent(
    items: list[tuple[int, int, int]], graphs: int, rule: str, prompt: float, text: float
) -> None:
    stages = (Stage.FRESH, Stage.VISION, Stage.DECODE)
    prices = [price(stages[s], (n, 64) if s != 1 else (64 * n,), n, w) for s, n, w in items]
    prefill = share_of(graphs, prompt)
    d = MemorySplit(
        10 * graphs, graphs, 0, 0, share_of(prefill, text), prefill - share_of(prefill, text), graphs - prefill
    )
    choice = select_graphs(prices, d, GraphSettings(), rule)
    assert sum(choice.spent.values()) <= graphs
    assert {p.bucket for p in choice.missing} | {p.bucket for t in choice.taken.values() for p in t} == {
        p.bucket for p in prices
    }
    assert {pool: set_cost(t, rule) for pool, t in choice.taken.items()} == dict(choice.spent)
    rest = graphs - sum(choice.spent.values())
    if rule == "sum":
        assert not any(can_pay(p.alone, rest) for p in choice.missing), "what is left would still buy one"


def test_leftovers_go_where_a_byte_gains_most() -> None:
    prices = [price(Stage.VISION, (64,), 50, gain=9.0), price(Stage.FRESH, (1, 64), 50, gain=1.0)]
    d = MemorySplit(1000, 60, 0, 0, 0, 0, 60)
    choice = select_graphs(prices, d, GraphSettings(), "sum")
    assert [p.bucket.stage for t in choice.taken.values() for p in t] == [Stage.VISION]


def test_capture_rules() -> None:
    mib = 1 << 20
    assert may_start(100 * mib, 406 * mib) and not may_start(100 * mib, 406 * mib - 1)
    assert can_pay(100, 110) and not can_pay(100, 109)


def test_predictions_come_from_neighbours() -> None:
    measured = {Bucket(Stage.FRESH, (1, 128)): 100, Bucket(Stage.FRESH, (1, 512)): 300, Bucket(Stage.DECODE, (1, 1)): 7}

    def even(bucket: Bucket) -> int:
        return 10

    def by_tokens(bucket: Bucket) -> int:
        return 5 * padded_tokens(bucket)

    assert predict_bytes(Bucket(Stage.FRESH, (1, 128)), even, measured) == 100
    assert predict_bytes(Bucket(Stage.FRESH, (1, 256)), even, measured) == 300
    assert predict_bytes(Bucket(Stage.FRESH, (1, 256)), by_tokens, measured) == 150
    assert predict_bytes(Bucket(Stage.FRESH, (1, 256)), lambda b: 1000 - padded_tokens(b), measured) == 300
    assert predict_bytes(Bucket(Stage.FRESH, (2, 512)), even, measured) == 600
    assert predict_bytes(Bucket(Stage.VISION, (64,)), by_tokens, measured) == 320


def test_a_prediction_from_another_variant_is_scaled_up_too() -> None:
    """A graph of more layers than its only neighbour of the same size has is not taken for as small."""
    plain, cross_attention = (Bucket(Stage.CONTEXT, (128, 8), variant) for variant in ("", "pictures4"))

    def formula(bucket: Bucket) -> int:
        return padded_tokens(bucket) * (5 if bucket.variant else 4)

    assert (
        predict_bytes(cross_attention, formula, {plain: 400}) == 500
        and predict_bytes(plain, formula, {cross_attention: 500}) == 400
    )
    larger = Bucket(Stage.CONTEXT, (256, 8), "pictures4")
    assert predict_bytes(larger, formula, {plain: 400}) == 1000
    assert predict_bytes(larger, formula, {plain: 400, cross_attention: 600}) == 1200


def test_the_reserve_that_holds_the_plan_does_hold_it() -> None:
    prices = [price(Stage.FRESH, (1, 64 * n), n << 20, 1 << 20) for n in range(1, 30)]
    prices += [price(Stage.VISION, (64 * n,), n << 22) for n in range(1, 20)]
    prices += [price(Stage.DECODE, (n, 1), n << 18) for n in range(1, 9)]
    before, settings = MemoryInUse(10 << 30), GraphSettings(0.02)
    small = divide_memory(before, 0.9, "free", settings, 1 << 20, True)
    choice = select_graphs(prices, small, settings, "sum")
    holds = reserve_that_holds(prices, small, settings, "sum", True)
    assert choice.missing and holds is not None
    line = exhausted_line(choice, holds, small)
    assert line is not None and f"VLLM_GRAPH_RESERVED_MEM={holds:.2f}" in line
    for reserve, complete in ((holds, True), (holds - 0.01, False)):
        d = divide_memory(before, 0.9, "free", GraphSettings(round(reserve, 2)), 1 << 20, True)
        assert (not select_graphs(prices, d, settings, "sum").missing) is complete


def test_an_unused_reserve_names_the_setting_and_the_blocks() -> None:
    before, block = MemoryInUse(100 * GB), 10**6
    d = divide_memory(before, 1.0, "free", GraphSettings(0.4), block, True)
    ledger = Ledger(before, d, {"text": GB, "vision": GB, "decode": GB})
    line = unused_line(ledger, block, 0.4, 0.03)
    assert line is not None and "VLLM_GRAPH_RESERVED_MEM=0.03" in line and "37000 KV blocks" in line
    after = divide_memory(before, 1.0, "free", GraphSettings(0.03), block, True)
    assert after.blocks - d.blocks == 37000
    assert unused_line(Ledger(before, after, {"text": GB, "vision": GB, "decode": GB}), block, 0.03, 0.03) is None


def test_measured_needs_replace_the_ratios() -> None:
    d = divide_memory(MemoryInUse(100 * GB), 1.0, "free", GraphSettings(requested=(GB, 2 * GB, 3 * GB)), 1, True)
    assert (d.text, d.vision, d.decode, d.graphs, d.kv) == (GB, 2 * GB, 3 * GB, 6 * GB, 94 * GB)
    tight = divide_memory(MemoryInUse(8 * GB), 1.0, "free", GraphSettings(requested=(GB, 2 * GB, 3 * GB)), 1, True)
    assert tight.graphs <= 4 * GB and tight.kv >= 4 * GB
