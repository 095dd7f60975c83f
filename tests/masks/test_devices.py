"""Under a rule and a seed every device draws the same tokens, at both depths, on two ranks, whoever is preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import llguidance
import pytest

from tests.oracles.happens_before import races
from tests.traffic.rule_oracle import RuleOracle
from tests.traffic.ruled_requests import GRAMMARS, RuledTraffic, ruled_answers, vocabulary
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinCall
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.uniproc_executor import SubmittedWork
from trencadis.core.output_constraints import Repetition, Rule
from trencadis.core.request import Request, SamplingParams
from trencadis.core.token_masks import grammar_matcher

LENGTH = 64
FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "block_size": 16, "num_gpu_blocks_override": 8, "encoder_cache_images": 2,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
HPU: dict[str, Any] = {"device": "hpu", "warmup": "skip"}
TWIN: dict[str, Any] = {"device": "cuda", "policy": "twin"}
DEVICES: dict[str, dict[str, Any]] = {
    "cpu, depth 1": {"async_depth": 1},
    "cpu padded, depth 0": {"policy": "padded", "async_depth": 0},
    "cpu padded, depth 1": {"policy": "padded", "async_depth": 1},
    "cpu, chunks of 7": {"max_num_batched_tokens": 7, "async_depth": 1},
    "hpu, depth 0": {**HPU, "async_depth": 0},
    "hpu, depth 1": {**HPU, "async_depth": 1},
    "cuda, depth 0": {**TWIN, "async_depth": 0},
    "cuda, depth 1": {**TWIN, "async_depth": 1},
    "2 ranks, depth 0": {"tensor_parallel_size": 2, "async_depth": 0},
    "2 ranks, depth 1": {"tensor_parallel_size": 2, "async_depth": 1},
    "2 ranks of cuda": {**TWIN, "tensor_parallel_size": 2, "async_depth": 1, "enforce_eager": True},
}
TIES = 0.01
"""Share of draws that may fall the other way: another order of summation moves a boundary by some 1e-6."""

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(vl_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """``make(async_depth=1)``: an engine, the same for the same flags; ended with the test file."""
    made: dict[str, Engine] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRENCADIS_HPU_EMULATOR", "1")
        patch.setenv("TRENCADIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256")

        def create(**flags: Any) -> Engine:
            key = str(sorted(flags.items()))
            if key not in made:
                made[key] = create_engine(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags}))
            return made[key]

        yield create
        for engine in made.values():
            engine.close()


@pytest.fixture(scope="module")
def wanted(make: Make) -> Callable[[int, int], RuledTraffic]:
    """What the CPU answers at depth 0, checked against the rules themselves."""
    engine = make(async_depth=0)
    known: dict[tuple[int, int], RuledTraffic] = {}

    def find(count: int, seed: int) -> RuledTraffic:
        if (count, seed) not in known:
            run = known[count, seed] = ruled_answers(engine, count, seed, LENGTH, most=8, aborts=0)
            held_to_rules(run)
        return known[count, seed]

    return find


def held_to_rules(run: RuledTraffic) -> None:
    """Every token of every answer may be drawn, and every answer ends where and why it should."""
    limits = run.engine.scheduler.limits
    oracle = RuleOracle(vocabulary(run.vocab, limits.eos), limits.eos)
    for (request_id, choice), tokens in run.tokens.items():
        request = run.asked[request_id]
        if request.rule is not None:
            for at, token in enumerate(tokens):
                assert token in oracle.may_draw(request.rule, request.params, tokens[:at]), (request_id, choice, at)
                end = oracle.over(request.rule, request.params, tokens[: at + 1])
                assert end == ("" if at + 1 < len(tokens) else run.why[request_id, choice])


def compared(engine: Engine, count: int, seed: int, wanted: Callable[[int, int], RuledTraffic]) -> str:
    """Asserts the same tokens; what there was of rules, in a line."""
    want = wanted(count, seed)
    got = ruled_answers(engine, count, seed, LENGTH, most=8, aborts=0)
    other = sum(got.tokens[key] != tokens for key, tokens in want.tokens.items())
    assert set(got.tokens) == set(want.tokens) and other <= TIES * len(want.tokens), f"{other} of {len(want.tokens)}"
    ends = Counter(got.why.values())
    return (
        f"{len(want.tokens)} answers, {other} differ, {engine.scheduler.totals.preemptions} preemptions, {dict(ends)}"
    )


@pytest.mark.parametrize("name", ["cpu padded, depth 1", "hpu, depth 1", "cuda, depth 1"])
def test_the_same_tokens_under_rules(name: str, make: Make, wanted: Callable[[int, int], RuledTraffic]) -> None:
    compared(make(**DEVICES[name]), 12, 0, wanted)


def two_steps(engine: Engine, rule: Rule | None) -> list[str]:
    """What the host and the card do in the second of two steps, whose tokens nobody has asked for meanwhile."""
    rank = engine.executor._rank  # type: ignore[attr-defined]
    runtime = rank.graphs.backend.runtime
    engine.life.add(Request("two", [5, 6, 7], SamplingParams(max_tokens=3, temperature=0), rule=rule))
    steps = [engine.scheduler.schedule()]
    pending = [rank.execute(steps[0])]
    steps.append(engine.scheduler.schedule())
    runtime.calls = calls = list[TwinCall]()
    pending.append(rank.execute(steps[1]))
    watched = [c for c in calls if c.kind in ("launch", "replay", "host read")]
    done = [c.name.partition("[")[0] or c.kind for c in watched]
    for one in pending:
        engine.life.update(one.result())
    runtime.calls = None
    while not engine.idle():
        engine.step()
    return [name for name, _ in groupby(done)]


def test_on_a_card_the_host_waits_for_a_token_behind_the_text_and_only_for_rules(make: Make) -> None:
    engine = make(**DEVICES["cuda, depth 1"])
    assert two_steps(engine, Rule(allowed=(3, 4))) == ["decode", "host read", "sample"]
    assert two_steps(engine, None) == ["decode", "sample"]
    assert two_steps(engine, Rule(repetition=Repetition(1, 2, 2))) == ["decode", "sample"]


def test_on_a_card_events_order_all_that_a_step_with_masks_touches(make: Make) -> None:
    engine = make(**DEVICES["cuda, depth 1"])
    runtime = engine.executor._rank.graphs.backend.runtime  # type: ignore[attr-defined]
    runtime.calls = calls = list[TwinCall]()
    ruled_answers(engine, 8, 5, LENGTH, most=8, aborts=0.1)
    runtime.calls = None
    assert len(calls) > 500 and races(calls) == []


def test_a_matcher_that_fails_ends_its_own_choice_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by a limit that the library reaches while a text goes on."""
    engine = make(async_depth=1)
    scarce = llguidance.LLParserLimits(step_max_items=9, verbose_errors=False)
    monkeypatch.setattr(grammar_matcher, "parser_limits", lambda: scarce)
    limits = engine.scheduler.limits
    engine.set_vocabulary(vocabulary(limits.vocab, limits.eos).pack())
    wide = llguidance.LLMatcher.grammar_from_lark(
        'start: "a" b\nb: c c | d d | e e\nc: "x" c | "y"\nd: "x" d | "z"\ne: "x" e | "w"'
    )
    requested = [SamplingParams(n=2, seed=i, max_tokens=9, ignore_eos=True) for i in range(3)]
    rules = [None, Rule(wide), Rule(allowed=(3, 4, 5))]
    for i, (params, rule) in enumerate(zip(requested, rules, strict=True)):
        engine.add(Request(f"f{i}", [5, 6, 7], params, rule=rule))
    ended = {}
    while not engine.idle():
        ended.update({(d.id, d.choice): d for d in engine.step() if d.finish})
    finish = [ended[f"f{i}", c].finish for i in range(3) for c in range(2)]
    assert finish == ["length", "length", "error", "error", "length", "length"]
    failed = ended["f1", 0]
    assert failed.status == 400 and failed.message and "\n" not in failed.message and len(failed.message) <= 150


def test_a_request_waits_for_its_grammar_while_others_go_on_and_may_be_aborted_meanwhile(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(async_depth=1)
    slow: dict[str, Future[str]] = {}
    real = engine.executor.prepare
    monkeypatch.setattr(engine.executor, "prepare", lambda text: SubmittedWork(slow.setdefault(text, Future())))
    good = GRAMMARS[3]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    for id, rule in (("slow", Rule(good)), ("gone", Rule(good)), ("bad", Rule("start: nosuch")), ("plain", None)):
        engine.add(Request(id, [5, 6, 7], replace(params, max_tokens=4 if rule is None else 30), rule=rule))
    ended = {}

    def turn() -> None:
        ended.update({d.id: d for d in engine.step() if d.finish})

    while "plain" not in ended:
        assert engine.busy()
        turn()
    engine.abort("gone")
    turn()
    assert ended["gone"].finish == "abort" and set(ended) == {"plain", "gone"} and not engine.idle()
    assert engine.stats().waiting == 1 + 1
    for text, future in slow.items():
        future.set_result(real(text).result())
    while not engine.idle():
        turn()
    assert ended["slow"].finish in ("stop", "length")
    assert (ended["bad"].finish, ended["bad"].status) == ("error", 400) and "nosuch" in ended["bad"].message


@pytest.fixture
def warmed(make: Make, vl_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``warmed(lazy=False)``: an emulated card whose planned shapes are all compiled."""
    made: list[Engine] = []
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))

    def create(lazy: bool = True, **flags: Any) -> Engine:
        monkeypatch.setenv("PT_HPU_LAZY_MODE", str(int(lazy)))
        given = {**FLAGS, **HPU, "warmup": "full", **flags}
        made.append(create_engine(EngineConfig(model=str(vl_checkpoint), **given)))
        return made[-1]

    yield create
    for engine in made:
        engine.close()


def nothing_compiled(engine: Engine, count: int, seed: int, miss: str = "") -> Counter[str]:
    """Asserts it over a run of ruled requests; how its choices ended. ``miss``: why launches are no replays."""
    before = engine.executor._rank.graphs.backend.compilations()  # type: ignore[attr-defined]
    run = ruled_answers(engine, count, seed, LENGTH, most=8)
    stats = engine.stats()
    assert (stats.graphs.recompiles, stats.graphs.lazy_compiles) == (0, 0)
    assert all(use.planned and (use.miss or "") == miss for use in stats.buckets)
    assert engine.executor._rank.graphs.backend.compilations() == before  # type: ignore[attr-defined]
    return Counter(run.why.values())


TINY: dict[str, Any] = {
    "max_num_seqs": 2, "num_gpu_blocks_override": 64, "enable_prefix_caching": False, "async_depth": 1, "block_size": 64
}  # fmt: skip
"""A plan of a dozen buckets."""


def test_rules_compile_nothing_after_warmup(warmed: Make) -> None:
    assert nothing_compiled(warmed(**TINY), 10, 3)


@pytest.mark.long
@pytest.mark.parametrize("lazy", [True, False])
def test_ten_thousand_ruled_requests_compile_nothing(warmed: Make, lazy: bool) -> None:
    engine = warmed(lazy, async_depth=1)
    miss = "" if lazy else "no_graphs"
    ends = sum((nothing_compiled(engine, 1000, 10 + part, miss) for part in range(10)), Counter[str]())
    print(f"\nlazy {lazy}: 10,000 requests, {engine.scheduler.totals.preemptions} preemptions, {dict(ends)}")


@pytest.mark.long
def test_compiled_buckets_draw_the_same_tokens_under_rules(
    warmed: Make, wanted: Callable[[int, int], RuledTraffic]
) -> None:
    print(f"\ncompile mode: {compared(warmed(lazy=False, async_depth=1), 300, 1, wanted)}")


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
def test_three_hundred_prompts_under_rules(name: str, make: Make, wanted: Callable[[int, int], RuledTraffic]) -> None:
    print(f"\n{name}: {compared(make(**DEVICES[name]), 300, 1, wanted)}")
