"""The persistent batch: what launches read of it, what a Step tells a rank, and what a step of the host costs."""

from __future__ import annotations

import random
import sys
import tracemalloc
from dataclasses import fields, replace
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.host.step import BLOCK, HostSteps, Load
from tests.engine.test_schedules import random_request
from tests.host.instruction_counts import instructions
from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from tests.oracles.shadow_model import expand_step
from trencadis.backends.cpu.backend import make_tensors
from trencadis.backends.cpu.host_padding import slot_map
from trencadis.core.executor import rank_messages
from trencadis.core.kv.block_pool import BlockHashChain
from trencadis.core.launch_inputs import StepInputs
from trencadis.core.launches.host_inputs import SampleRow, head_inputs, join_head_inputs, text_inputs
from trencadis.core.launches.rank_input_batch import BatchOutOfStep, RankInputBatch
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.sequence import uniform
from trencadis.core.step import Step

EVERYTHING = np.full((1, 8), 255, np.uint8)


def same(a: Any, b: Any, but: tuple[str, ...] = ()) -> None:
    for name in (f.name for f in fields(a) if f.name not in but):
        found, wanted = getattr(a, name), getattr(b, name)
        if wanted is None:
            assert found is None, name
            continue
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted), name


class Comparing:
    """Takes the Steps of a scheduler and compares what the batch gives a launch with what rows alone give it."""

    def __init__(self, size: int) -> None:
        self.batch, self.size = RankInputBatch(), size
        self.seated = self.guests = self.alone = 0

    def take(self, step: Step) -> None:
        batch = self.batch
        batch.apply(step.batch)
        self.seated += step.persistent_count
        self.guests += len(step.rows) if step.persistent_count else 0
        rows = batch.with_all_rows(step).rows
        if rows:
            found = batch.inputs_with_borrowed_rows(text_inputs(step.rows)) if step.rows else batch.inputs()
            wanted = text_inputs(rows)
            width = wanted.blocks.shape[1]
            assert np.array_equal(found.blocks[:, :width], wanted.blocks) and not found.blocks[:, width:].any()
            assert found.table is None or not found.table[len(rows) :].any(), "rows behind the batch are not ZERO"
            if step.persistent_count:  # a persistent row reads its token on the device, PENDING or not
                assert (found.from_slot[: step.persistent_count] > 0).all()
            same(found, wanted, ("blocks", "table", "last"))
            if not step.rows:
                self.nothing_else_is_read(found)
        self.heads(step, batch)
        if step.batch is not None:
            batch.advance(step.rows, step.batch.joins)

    def nothing_else_is_read(self, found: StepInputs) -> None:
        """Where persistent rows store tokens follows from a few numbers, as a table of 32k tokens fits no cache."""
        stored = slot_map(replace(found, last=None), len(found.tokens), self.size)
        unread = np.full_like(found.blocks, -1)
        assert np.array_equal(slot_map(replace(found, blocks=unread), len(found.tokens), self.size), stored)
        self.alone += 1

    def heads(self, step: Step, batch: RankInputBatch) -> None:
        """SAMPLE of the persistent rows, and of the other rows behind them."""
        own = [SampleRow(i + 1, r.samples[0].slot, r.samples[0].sample) for i, r in enumerate(batch.rows())]
        others = [SampleRow(5, d.slot, replace(d.sample, handle=0)) for r in step.rows for d in r.samples]
        if not own:
            return
        assert batch.head_needs().full == any(r.sample.full for r in own)
        assert batch.head_needs().best == all(r.sample.best for r in own if r.sample.full)
        found = (
            join_head_inputs(batch.head(EVERYTHING), head_inputs(others, VOCAB)) if others else batch.head(EVERYTHING)
        )
        same(found, head_inputs([*own, *others], VOCAB))


@pytest.mark.parametrize("seed", range(2))
def test_launches_read_the_same_from_persistent_rows_as_from_rows(seed: int) -> None:
    """Random requests under little memory: sequences join and leave, blocks grow, prompts run beside them."""
    rng, made = random.Random(seed), Comparing(2)
    engine, _ = shadow_engine(blocks=60, size=2, rows=14, depth=seed % 2, seqs=rng.choice([3, 8]))
    schedule = engine.scheduler.schedule

    def seen() -> Step | None:
        step = schedule()
        if step is not None:
            made.take(step)
        return step

    engine.scheduler.schedule = seen  # type: ignore[method-assign]
    driver = ScheduleDriver(engine, rng, 96)
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(96)] for _ in range(3)]
    for number in range(40):
        driver.add(random_request(rng, number, 96, images=0, prefixes=prefixes))
        for _ in range(rng.choice([0, 1, 3, 10])):
            driver.run_step()
        if rng.random() < 0.2:
            engine.abort(f"r{rng.randrange(number + 1)}")
    driver.finish()
    driver.verify()
    assert made.seated > 100 and made.guests > 20 and made.alone > 20


@pytest.mark.parametrize("depth", range(3))
def test_a_block_is_published_as_soon_as_it_is_full(depth: int) -> None:
    """Behind each step, whose blocks are those of which all tokens are known and computed; with little memory too."""
    rng, engine = random.Random(depth), shadow_engine(blocks=60, size=2, rows=14, depth=depth, seqs=5)[0]
    driver, pool, looked = ScheduleDriver(engine, rng, 96), engine.scheduler.pool, 0
    for number in range(30):
        driver.add(random_request(rng, number, 96, images=0, prefixes=[[5] * 96]))
        for _ in range(rng.choice([1, 3, 10])):
            driver.run_step()
            for seq in engine.scheduler.running:
                full = min(seq.computed, seq.count_known()) // 2
                keys = BlockHashChain(seq.request, 2).extend(seq.tokens, 2 * full)
                assert seq.published == full
                found = {block: key for key in keys if (block := pool.find(key)) is not None}
                assert all(found.get(block, key) == key for block, key in zip(seq.blocks, keys, strict=False))
                looked += seq.batch_row >= 0 and seq.published * 2 > seq.prompt
    driver.finish()
    driver.verify()
    assert looked > 100


def test_a_rank_that_missed_a_step_refuses_the_next() -> None:
    engine, _ = shadow_engine(blocks=40, size=4, rows=14, depth=0)
    engine.add(Request("r", [3, 4, 5], SamplingParams(max_tokens=9, seed=1, ignore_eos=True)))
    steps, schedule = list[Step](), engine.scheduler.schedule

    def seen() -> Step | None:
        step = schedule()
        steps.extend([step] if step is not None else [])
        return step

    engine.scheduler.schedule = seen  # type: ignore[method-assign]
    while not engine.idle():
        engine.step()
    whole, missed = RankInputBatch(), RankInputBatch()
    for step in steps:
        expand_step(whole, step)
    expand_step(missed, steps[0])
    with pytest.raises(BatchOutOfStep, match=r"change 3 .* change 1"):
        expand_step(missed, steps[2])


def test_a_step_of_256_rows_is_told_in_a_few_kilobytes() -> None:
    """At most 16 KB to a second rank; with 32k of context as with 1k, since only new blocks are told."""
    host, sizes = HostSteps(Load(256, 64, begin=256)), list[int]()
    execute = host.runner.execute

    def counted(step: Step) -> Any:
        data = rank_messages.encode(rank_messages.RunStep(step))
        sizes.append(len(data))
        down = rank_messages.decode_down(data)
        assert isinstance(down, rank_messages.RunStep)
        return execute(down.step)

    host.runner.execute = counted  # type: ignore[method-assign]
    for _ in range(20):
        host.step()
    print(f"{max(sizes)} bytes a step")
    assert max(sizes) <= 4096


def with_free_rows() -> HostSteps:
    """Two long answers, and as many rows again that others may have."""
    host = HostSteps(Load(4, 20))
    for name in ("r1", "r3"):
        host.life.abort(name)
    return host


def come_and_go(host: HostSteps, steps: int, look: Any = None) -> None:
    """Runs ``steps`` steps while short answers begin and end beside those of ``host``."""
    rng = random.Random(3)
    for number in range(steps):
        if number % 9 == 0:
            params = SamplingParams(temperature=rng.choice([0.0, 0.7]), max_tokens=rng.randrange(1, 40), seed=number)
            host.life.add(Request(f"s{number}", [1 + number] * rng.randrange(1, 40), params))
        host.step()
        host.scheduler.check()
        if look is not None:
            look()


def test_each_draw_has_the_number_of_its_output() -> None:
    """Also where a batch of numbers ends, of rows that began at any time, and of those that take another's place."""
    host, seen = with_free_rows(), 0
    execute = host.runner.execute

    def checked(step: Step) -> Any:
        nonlocal seen
        numbers = () if step.batch is None else step.batch.uniform
        drawing = host.scheduler.in_flight[-1].persistent
        for seq, number in zip(drawing, numbers, strict=bool(len(numbers))):
            if not seq.request.params.greedy:
                assert number == np.float32(uniform(seq.seed, seq.index, seq.outputs - 1))
                seen += 1
        return execute(step)

    host.runner.execute = checked  # type: ignore[method-assign]
    come_and_go(host, 400)
    assert seen > 800


def test_what_comes_again_reads_as_if_it_were_made_anew() -> None:
    """Tensors of persistent rows are written in place while no row is given to another sequence."""
    host, again = with_free_rows(), 0
    backend = host.runner.backend
    fill = backend.fill

    def checked(program: Any, inputs: Any) -> None:
        nonlocal again
        again += program.source is inputs
        fill(program, inputs)
        made = make_tensors(program.bucket, inputs, BLOCK)
        for found, wanted in zip(flat(program.inputs), flat(made), strict=True):
            assert (found is wanted is None) or (found.dtype == wanted.dtype and torch.equal(found, wanted))

    backend.fill = checked  # type: ignore[method-assign]
    come_and_go(host, 200)
    assert again > 100


def flat(tree: Any) -> list[Any]:
    """The leaves of nested tuples."""
    return [leaf for item in tree for leaf in flat(item)] if isinstance(tree, tuple) else [tree]


# Counted work


def work_of(load: Load, steps: int = 16) -> float:
    """Instructions of a step, on average over the steps in which each row passes the end of one block."""
    host = HostSteps(load)
    for _ in range(3):
        host.step()
    return instructions(lambda: [host.step() for _ in range(steps)]) / steps


def test_a_step_costs_what_changes_and_not_what_exists() -> None:
    """Neither the length of contexts nor the queue counts; a row counts little beside what a step costs anyway."""
    few, many = work_of(Load(4, 64)), work_of(Load(64, 64))
    row = (many - few) / 60
    print(f"{few - 4 * row:.0f} instructions a step and {row:.0f} a row")
    assert row < 250 and few < 5000
    assert work_of(Load(4, 2000)) < 1.02 * few, "longer contexts cost more"
    assert work_of(Load(4, 64, waiting=2000)) < 1.02 * few, "waiting requests cost more"


def test_a_step_of_one_row_that_goes_on_looks_at_little() -> None:
    """Arrays are looked at when a row comes to a date, and launches of a row that goes on get the arrays they had."""
    one = work_of(Load(1, 64), 128)
    print(f"{one:.0f} instructions")
    assert one < 4200


MOST_FUNCTIONS = 60
"""Functions from schedule to update for a row that goes on, without drafts and the model: what a reader follows."""


def functions_of_a_step(host: HostSteps) -> int:
    """How many functions of this package a step calls, each counted once."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("trencadis."):
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        host.step()
    finally:
        sys.setprofile(None)
    return len(called)


def test_a_step_of_one_row_calls_few_functions() -> None:
    host = HostSteps(Load(1, 64, greedy=True, depth=0))
    for _ in range(20):
        host.step()
    assert 20 < min(functions_of_a_step(host) for _ in range(8)) <= MOST_FUNCTIONS


def waiting_for_blocks(context: int, shared: int) -> HostSteps:
    """Rows are free, but few blocks: a request waits that begins as one which runs, with ``shared`` tokens of that."""
    host = HostSteps(Load(4, context), spare=0, max_rows=8)
    host.scheduler.pool.take(host.scheduler.pool.free - 20)
    tokens = host.life.requests["r3"][0].request.tokens[:shared]
    host.life.add(Request("late", [*tokens, *range(1, 2001)], SamplingParams(max_tokens=9, seed=1)))
    return host


def each_step(host: HostSteps, steps: int = 16) -> float:
    """Instructions of a step."""
    for _ in range(3):
        host.step()
    return instructions(lambda: [host.step() for _ in range(steps)]) / steps


def test_a_request_that_waits_for_blocks_does_not_look_them_up_in_each_step() -> None:
    few, many = (each_step(waiting_for_blocks(4000, shared)) for shared in (0, 4000))
    print(f"{few:.0f} instructions a step, {many:.0f} with 250 blocks found")
    assert many < 1.05 * few


def test_a_long_row_costs_the_short_ones_nothing() -> None:
    """128k tokens beside short prompts: neither instructions nor new memory of a step grow with its 8,192 blocks."""

    def cost(prompt: int) -> tuple[float, int]:
        host = HostSteps(Load(8, 64), spare=9000, max_rows=9, max_model_len=1 << 18, max_tokens=1 << 18)
        host.life.add(Request("long", [1 + i % 50_000 for i in range(prompt)], SamplingParams(max_tokens=90, seed=1)))
        while host.scheduler.waiting or any(seq.outputs < 2 for seq in host.scheduler.running):
            host.step()
        work = each_step(host)
        tracemalloc.start()
        host.step()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        host.step()
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        return work, peak

    (short, little), (long, much) = cost(64), cost(1 << 17)
    print(f"{short:.0f} and {long:.0f} instructions, {little} and {much} bytes")
    assert long < 1.02 * short and much < little + 4096


def test_choices_of_a_long_prompt_do_not_read_it_again() -> None:
    """What 16 choices cost that share a prompt, from their first draw to the end of their first blocks."""

    def cost(prompt: int) -> int:
        host = HostSteps(Load(1, 64), spare=4000, max_rows=17)
        host.scheduler.slots = list(range(20, 1, -1))
        host.life.add(Request("n", [1 + i % 999 for i in range(prompt)], SamplingParams(n=16, max_tokens=90, seed=1)))
        while len(host.scheduler.running) < 17:
            host.step()
        return instructions(lambda: [host.step() for _ in range(20)])

    short, long = cost(100), cost(3204)
    print(f"{short} and {long} instructions in 20 steps")
    assert long < 1.02 * short


def test_clients_that_go_cost_what_they_held() -> None:
    """Not what others hold or wait for."""

    def cost(rows: int, waiting: int) -> int:
        host = HostSteps(Load(rows, 64, waiting, begin=rows))
        host.scheduler.limits = replace(host.scheduler.limits, max_rows=rows - 8)  # nobody takes their place
        for _ in range(3):
            host.step()

        def go() -> None:
            for number in range(8):
                host.life.abort(f"r{number}")

        return instructions(go) + instructions(host.step) - instructions(host.step)

    alone, among, before = cost(9, 0), cost(40, 0), cost(40, 2000)
    print(f"{alone}, {among} and {before} instructions")
    assert among < 1.2 * alone and before < 1.05 * among
