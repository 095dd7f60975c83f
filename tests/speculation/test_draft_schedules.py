"""Random schedules with drafts over the shadow model: whatever is drafted, rejected, preempted or aborted, answers and
published blocks are those without drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import test_schedules
from tests.masks import test_late_masks
from tests.oracles.shadow_engine import EOS, VOCAB, ScheduleDriver, shadow_engine
from tests.oracles.shadow_model import ShadowRank, kv_value, oracle_end
from tests.speculation.scripted_proposer import ScriptedProposer
from tests.traffic.requests import searched
from tests.traffic.rule_oracle import VOCABULARY
from trencadis.core.engine.engine import Engine
from trencadis.core.output_constraints import Rule
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.spec.draft_count import VerifyShapes
from trencadis.core.spec.draft_proposer_interface import DraftProposer
from trencadis.core.spec.spec_config import SpeculationConfig
from trencadis.core.step import Step

LENGTH = 96
"""Longest sequence of any engine here: the oracle's answers of shorter ones are their beginnings."""


def right(seq: Sequence) -> list[int]:
    """What the shadow model answers."""
    request = seq.request
    if request.beams is not None:
        return []
    return oracle_end(request, seq.index, request.params.seed or 0, EOS, VOCAB, LENGTH)[0]


def scripted(kind: str, seed: int = 0) -> Callable[[Sequence], DraftProposer]:
    """A source that is always right, always wrong, right or wrong by chance, or random."""
    rng = random.Random(seed)

    def make(seq: Sequence) -> DraftProposer:
        answer = [] if kind == "random" else right(seq)

        def guess(tokens: Any, known: int) -> int:
            at = known - seq.prompt
            if kind == "random":
                return rng.randrange(-1, VOCAB)
            if at >= len(answer):
                return -1
            wrong = kind == "wrong" or (kind == "mixed" and rng.random() < 0.4)
            return (answer[at] + 1) % VOCAB if wrong else answer[at]

        return ScriptedProposer(guess)

    return make


def shape(kind: str, drafts: int, **more: Any) -> dict[str, Any]:
    """What an engine drafts."""
    if kind in ("ngram", "suffix"):
        return {"speculation": SpeculationConfig(kind, drafts, shortest=1, always=True, **more)}
    return {"speculation": SpeculationConfig("ngram", drafts, always=True, **more), "make_source": scripted(kind)}


KINDS = ["right", "wrong", "mixed", "random", "ngram", "suffix"]


@pytest.mark.parametrize("depth", [0, 1])
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS), drafts=st.sampled_from([1, 3, 7]))
@settings(max_examples=25, deadline=None)
def test_answers_do_not_depend_on_drafts(depth: int, seed: int, kind: str, drafts: int) -> None:
    test_schedules.play(seed, 12, depth, **shape(kind, drafts))


@pytest.mark.parametrize("stages", [2, 4])
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["right", "mixed", "ngram"]))
@settings(max_examples=6, deadline=None)
def test_answers_do_not_depend_on_drafts_in_micro_batches(stages: int, seed: int, kind: str) -> None:
    test_schedules.play(seed, 12, stages - 1, stages=stages, **shape(kind, 3))


@pytest.mark.parametrize("seed", range(3))
def test_beams_go_on_beside_drafts(seed: int) -> None:
    def change(request: Request, rng: random.Random) -> Request:
        return searched(request, rng) if rng.random() < 0.4 else request

    test_schedules.play(seed, 12, seed % 2, change, (1, 3, 8, 16), **shape("mixed", 3))


@pytest.mark.parametrize(("seed", "depth", "overlaps"), test_late_masks.RUNS)
@pytest.mark.parametrize("kind", ["right", "mixed", "wrong"])
def test_every_token_keeps_its_rule_under_drafts(seed: int, depth: int, overlaps: bool, kind: str) -> None:
    """Grammars, allowed ids, bad words, budgets, min_tokens: also where ids are forced, and where a place after drafts
    leaves no id.
    """
    forced = {"right": 32, "mixed": 0, "wrong": 3}[kind]
    test_late_masks.play(100 + seed, 20, depth, overlaps, **shape(kind, 3, forced=forced))


def watch_published_blocks(scheduler: Scheduler, rank: ShadowRank) -> Callable[[], None]:
    """Notes what each published block must hold; the returned function compares it with the rank's memory."""
    expected: dict[bytes, list[int]] = {}
    size, publish = scheduler.limits.block_size, scheduler.publish

    def noted(seq: Sequence) -> None:
        before = seq.published
        publish(seq)
        for block in range(before, seq.published) if not seq.request.spans else ():
            at = range(block * size, (block + 1) * size)
            assert at[-1] < seq.computed and at[-1] < seq.count_known(), "a block with a draft is published"
            key = seq.block_hashes.key(seq.tokens, block)
            expected[key] = [kv_value(seq.tokens[i], (i, i, i)) for i in at]

    scheduler.publish = noted  # type: ignore[method-assign]

    def compare() -> None:
        held = {key: block for block, key in scheduler.pool._key.items()}
        for key, cells in expected.items():
            if key in held:
                assert rank.kv[held[key]] == cells, "a published block holds other tokens"

    return compare


def drafted_run(seed: int, count: int, kind: str, drafts: int, depth: int) -> tuple[ScheduleDriver, Engine]:
    """A tiny pool, aborts while drafts are verified, and the pool's invariants after every step."""
    rng = random.Random(seed)
    size = rng.choice([2, 4, 8])
    length = rng.choice([32, 48])
    engine, rank = shadow_engine(
        blocks=-(-length // size) + rng.choice([0, 1, 3]), size=size, rows=14, depth=depth, seqs=rng.choice([2, 4]),
        tokens=rng.choice([5, 16, 64]), length=length, **shape(kind, drafts),
    )  # fmt: skip
    driver = ScheduleDriver(engine, rng, length)
    compare = watch_published_blocks(engine.scheduler, rank)
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(length)] for _ in range(2)]
    for number in range(count):
        driver.add(test_schedules.random_request(rng, number, length, images=0, prefixes=prefixes))
        for _ in range(rng.choice([0, 1, 4])):
            driver.run_step()
            engine.scheduler.check()
        if rng.random() < 0.3:
            engine.abort(f"r{rng.randrange(number + 1)}", rng.choice([-1, 0]))
            engine.scheduler.check()
    while not engine.idle():
        driver.run_step()
        engine.scheduler.check()
        if not engine.scheduler.in_flight:
            compare()
    driver.finish()
    driver.verify()
    return driver, engine


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_no_block_is_lost_or_published_with_a_rejected_draft(seed: int, depth: int) -> None:
    drafted_run(seed, 6, KINDS[seed % len(KINDS)], 1 + seed % 7, depth)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_ten_thousand_schedules_lose_no_block(depth: int) -> None:
    verified = accepted = preempted = 0
    for seed in range(5000):
        _, engine = drafted_run(50_000 + seed, 4, KINDS[seed % len(KINDS)], 1 + seed % 7, depth)
        totals = engine.scheduler.totals
        verified += totals.spec_draft_tokens
        accepted += totals.spec_accepted
        preempted += totals.preemptions
    print(f"depth {depth}: 5000 schedules, {verified} drafts, {accepted} accepted, {preempted} preemptions")
    assert verified > accepted > 10_000 and preempted > 100


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_requests_with_drafts(kind: str, depth: int) -> None:
    total = accepted = preempted = 0
    for seed in range(8):
        driver = test_schedules.play(7000 + seed, 200, depth, **shape(kind, (1, 3, 7)[seed % 3]))
        total += len(driver.requests)
        accepted += driver.engine.scheduler.totals.spec_accepted
        preempted += driver.engine.scheduler.totals.preemptions
    print(f"{kind}, depth {depth}: {total} requests, {accepted} drafts accepted, {preempted} preemptions")


def answer_alone(depth: int, request: Request, **more: Any) -> tuple[list[int], Engine, list[Step]]:
    """The answer of one request, and the steps that it took."""
    engine, rank = shadow_engine(blocks=64, size=4, rows=14, depth=depth, length=LENGTH, **more)
    if request.rule is not None:
        engine.set_vocabulary(VOCABULARY.pack())
    steps: list[Step] = []
    execute = rank.execute

    def noted(step: Step) -> Any:
        steps.append(step)
        return execute(step)

    rank.execute = noted  # type: ignore[method-assign]
    driver = ScheduleDriver(engine, random.Random(0), LENGTH)
    driver.add(request)
    driver.finish()
    driver.verify()
    return driver.got[request.id, 0], engine, steps


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("temperature", "penalty"), [(0.0, 0.0), (1.0, 0.0), (1.0, 0.5)])
def test_right_drafts_give_several_tokens_a_step(depth: int, temperature: float, penalty: float) -> None:
    params = SamplingParams(temperature=temperature, presence_penalty=penalty, max_tokens=41, seed=3, ignore_eos=True)
    request = Request("r", [5, 6, 7], params)
    tokens, engine, steps = answer_alone(depth, request, **shape("right", 4))
    assert len(tokens) == 41 and len(steps) == 1 + 8  # the prompt's, then five tokens each
    assert [sum(len(row.tokens) for row in step.rows) for step in steps] == [3, *[5] * 8]  # none is computed twice
    totals = engine.scheduler.totals
    assert totals.spec_drafts == 8 and totals.spec_accepted == totals.spec_draft_tokens == 32
    assert totals.spec_accepted_at == [8, 8, 8, 8]


def test_drafts_are_bounded_by_the_answers_length_and_by_its_end() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=4, seed=3, ignore_eos=True))
    _, engine, steps = answer_alone(0, request, **shape("right", 7))
    assert len(steps) == 2 and engine.scheduler.totals.spec_draft_tokens == 2  # the last token has no draft
    assert all(len(row.tokens) <= 3 for row in steps[1].rows)


def test_a_wrong_source_stops_being_asked_to_pay() -> None:
    """With the costs weighed, drafts that are always wrong end, but for a trial now and then."""
    request = Request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=90, seed=3, ignore_eos=True))
    more = {"speculation": SpeculationConfig("ngram", 4), "make_source": scripted("wrong")}
    _, engine, steps = answer_alone(0, request, **more)
    assert engine.scheduler.totals.spec_draft_tokens < 60 and len(steps) == 90


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mixed", [True, False])
def test_planned_launches_are_weighed_as_they_are_padded(
    depth: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right drafts are all verified; wrong ones end but for trials, and a step waits for none then."""
    monkeypatch.setattr(DraftScheduler, "learn", lambda *_: None)  # by assumed durations
    create = DraftScheduler.__init__

    def created(self: DraftScheduler, *args: Any) -> None:
        create(self, *args)
        self.shapes = VerifyShapes((1, 2, 4), (1, 4), 5, mixed)

    monkeypatch.setattr(DraftScheduler, "__init__", created)
    params = SamplingParams(temperature=0, max_tokens=90, seed=3, ignore_eos=True)
    request, config = Request("r", [5, 6, 7], params), SpeculationConfig("ngram", 4)
    _, engine, steps = answer_alone(depth, request, speculation=config, make_source=scripted("right"))
    totals = engine.scheduler.totals
    assert totals.spec_accepted == totals.spec_draft_tokens == 71 and len(steps) == 1 + 18
    _, engine, steps = answer_alone(depth, request, speculation=config, make_source=scripted("wrong"))
    assert len(steps) == 90 and 0 < engine.scheduler.totals.spec_draft_tokens < 60


@pytest.mark.parametrize("stops", [[], [30], [1, 30]])
def test_forced_ids_join_one_step(stops: list[int]) -> None:
    """A regex that spells one text: its ids come without a launch each, and the end too. Stop ids are text inside."""
    import llguidance

    grammar = llguidance.LLMatcher.grammar_from_regex("xyz(a|b)123456")
    params = SamplingParams(temperature=0, max_tokens=40, seed=3, stop_token_ids=stops)
    request = Request("r", [5], params, rule=Rule(grammar=grammar))
    plain, _, slow = answer_alone(0, request)
    assert 30 in plain[:-1]
    for depth in (0, 1):
        tokens, _, steps = answer_alone(depth, request, **shape("ngram", 1, forced=32))
        assert tokens == plain and len(steps) <= 4 < len(slow)
