"""Whole engines on the CPU: with drafts, answers, log-probabilities and the sampler's counts are those without."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.speculation.scripted_proposer import ScriptedProposer
from tests.traffic.requests import Traffic, pixels, random_request
from tests.traffic.ruled_requests import ruled, vocabulary
from trencadis.core.engine.engine import Engine
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.request import Delta, Request, SamplingParams
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.spec.draft_proposer_interface import DraftProposer
from trencadis.core.spec.spec_config import SpeculationConfig

LENGTH = 96
FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": LENGTH, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 9, "encoder_cache_images": 2,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112}, "batch_invariant": True,
}  # fmt: skip
Answers = dict[tuple[str, int], list[int]]


@dataclass
class SampledTraffic(Traffic):
    """Requests with every sampling field, some under rules, some with log-probabilities.

    Args:
        lengths: of answers.
        predicted: texts that come as ``prediction`` of a request, by its id; every tenth id of them is changed.
    """

    lengths: tuple[int, ...] = (6, 16, 24)
    predicted: Mapping[tuple[str, int], list[int]] = field(default_factory=dict)
    scores: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    def request(self, rng: random.Random) -> Request:
        """Request number ``sent``."""
        made = random_request(rng, self.sent, self.length, self.vocab, self.most)
        made = ruled(made, rng, self.vocab, self.engine.scheduler.limits.eos) if rng.random() < 0.5 else made
        most = rng.choice(self.lengths)
        params = replace(
            made.params, prompt_logprobs=None, max_tokens=most, min_tokens=min(made.params.min_tokens, most),
            min_p=rng.choice([0.0, 0.05]), top_k=rng.choice([0, 7]), top_p=rng.choice([1.0, 0.9]),
            frequency_penalty=rng.choice([0.0, 0.4]), repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]), logprobs=rng.choice([None, None, 2]),
            logit_bias=rng.choice([None, {5: 1.5, 9: -2.0}]),
        )  # fmt: skip
        answer = self.predicted.get((made.id, 0), [])
        changed = [(id + 1) % self.vocab if at % 10 == 9 else id for at, id in enumerate(answer)]
        return replace(made, params=params, prediction=changed)

    def take(self, delta: Delta) -> None:
        super().take(delta)
        if delta.logprobs:
            self.scores.setdefault((delta.id, delta.choice), []).extend(
                (one.token, one.logprob, one.rank, *one.top_ids, *one.top_logprobs) for one in delta.logprobs
            )


def engine_of(path: Path, **flags: Any) -> Engine:
    return create_engine(EngineConfig(model=str(path), **{**FLAGS, **flags}))


def run(engine: Engine, seed: int, count: int, predicted: Answers | None = None, closes: bool = True) -> SampledTraffic:
    """Answers of random requests, which may come with a prediction; ``closes``: the engine is closed behind them."""
    sizes = engine.scheduler.limits
    engine.set_vocabulary(vocabulary(engine.info().vocab_size, sizes.eos).pack())
    sizes_of: dict[str, Any] = {"length": LENGTH * 2 // 3, "vocab": engine.info().vocab_size, "most": 8}
    traffic = SampledTraffic(engine, seed, count, **sizes_of, aborts=0.0, predicted=predicted or {})
    traffic.run()
    engine.scheduler.check()
    assert engine.scheduler.pool.used == 0
    if closes:
        engine.close()
    return traffic


def scripted(answers: Answers, kind: str, vocab: int) -> Callable[[Sequence], DraftProposer]:
    """Drafts of known answers: right, wrong, or wrong in every third place."""

    def make(seq: Sequence) -> DraftProposer:
        answer = answers.get((seq.request.id, seq.index), [])

        def guess(tokens: Any, known: int) -> int:
            at = known - seq.prompt
            if at >= len(answer):
                return -1
            wrong = kind == "wrong" or (kind == "mixed" and at % 3 == 2)
            return (answer[at] + 1) % vocab if wrong else answer[at]

        return ScriptedProposer(guess)

    return make


def draft_by(engine: Engine, answers: Answers, kind: str, drafts: int) -> None:
    """Replaces the engine's source by a script."""
    source = scripted(answers, kind, engine.info().vocab_size)
    scheduler = engine.scheduler
    config = SpeculationConfig("ngram", drafts, always=True)
    scheduler.drafting = DraftScheduler(config, scheduler.limits, scheduler.totals, source)


def compare(path: Path, seed: int, count: int, cases: list[tuple[str, int]], **flags: Any) -> list[int]:
    """Runs requests without and with drafts; returns the accepted drafts of each case."""
    plain = run(engine_of(path, speculation=False, **flags), seed, count)
    accepted = []
    for kind, drafts in cases:
        if kind in ("ngram", "suffix"):
            asked = {"method": kind, "num_speculative_tokens": drafts, "prompt_lookup_min": 1}
            engine = engine_of(path, speculative_config=asked, spec_always=True, **flags)
        elif kind == "prediction":
            engine = engine_of(path, **flags)
            scheduler = engine.scheduler
            config = SpeculationConfig("", drafts, always=True)
            scheduler.drafting = DraftScheduler(config, scheduler.limits, scheduler.totals)
        else:
            engine = engine_of(path, **flags)
            draft_by(engine, plain.tokens, kind, drafts)
        drafted = run(engine, seed, count, plain.tokens if kind == "prediction" else None)
        assert drafted.tokens == plain.tokens, f"{kind}, k = {drafts}"
        assert drafted.scores == plain.scores and drafted.ended == plain.ended, f"{kind}, k = {drafts}"
        accepted.append(engine.scheduler.totals.spec_accepted)
    return accepted


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_and_log_probabilities_are_those_without_drafts(vl_checkpoint: Path, depth: int) -> None:
    """Images, forks, penalties, rules and preemption; drafts right, wrong and mixed."""
    right, mixed, wrong, own, predicted = compare(
        vl_checkpoint, 1 + depth, 24, [("right", 4), ("mixed", 3), ("wrong", 1), ("ngram", 7), ("prediction", 4)],
        async_depth=depth,
    )  # fmt: skip
    assert right > mixed > 20 and wrong == 0 and own > 0 and right > predicted > 20


def test_padded_launches_verify_drafts_alike(vl_checkpoint: Path) -> None:
    found = compare(vl_checkpoint, 5, 12, [("mixed", 3), ("suffix", 4)], policy="padded")
    assert min(found) > 0


def test_blocks_that_are_not_shared_hold_drafts_alike(vl_checkpoint: Path) -> None:
    """Without a prefix cache a preempted sequence computes all its tokens again."""
    cases = [("ngram", 7), ("suffix", 4), ("prediction", 3)]
    assert min(compare(vl_checkpoint, 2, 16, cases, async_depth=1, enable_prefix_caching=False)) > 0


RANKS: dict[str, dict[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2}, "two stages": {"pipeline_parallel_size": 2},
    "two stages of two ranks": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}  # fmt: skip
MANY = int(os.environ.get("TRENCADIS_TEST_REQUESTS", "60"))
"""Requests of the long run over ranks and stages."""

SOURCES = ("right", "mixed", "wrong", "ngram", "suffix", "prediction")


@pytest.mark.parametrize("ranks", ["two ranks", "two stages"])
def test_ranks_and_stages_verify_drafts_alike(vl_checkpoint: Path, ranks: str) -> None:
    cases = [("mixed", 3), ("prediction", 4), ("ngram", 7), ("suffix", 3)]
    mixed, predicted, *own = compare_in_one_engine(vl_checkpoint, 3, 8, cases, **RANKS[ranks])
    assert mixed > 20 and predicted > 20 and min(own) > 0


def compare_in_one_engine(path: Path, seed: int, count: int, cases: list[tuple[str, int]], **flags: Any) -> list[int]:
    """As ``compare``, by one engine whose source is exchanged: processes of ranks are started once."""
    engine = engine_of(path, speculative_config={"prompt_lookup_min": 1}, spec_always=True, **flags)
    scheduler = engine.scheduler
    assert scheduler.drafting is not None
    config, scheduler.drafting = scheduler.drafting.config, None
    plain = run(engine, seed, count, closes=False)
    accepted = []
    for kind, drafts in cases:
        before = scheduler.totals.spec_accepted
        if kind in ("right", "mixed", "wrong"):
            draft_by(engine, plain.tokens, kind, drafts)
        else:
            asked = replace(config, method="" if kind == "prediction" else kind, drafts=drafts)
            scheduler.drafting = DraftScheduler(asked, scheduler.limits, scheduler.totals)
        drafted = run(engine, seed, count, plain.tokens if kind == "prediction" else None, closes=False)
        assert drafted.tokens == plain.tokens, f"{kind}, k = {drafts}"
        assert drafted.scores == plain.scores and drafted.ended == plain.ended, f"{kind}, k = {drafts}"
        accepted.append(scheduler.totals.spec_accepted - before)
    engine.close()
    return accepted


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_and_stages_verify_drafts_of_each_source(vl_checkpoint: Path, ranks: str) -> None:
    cases = [(kind, k) for kind in SOURCES for k in (1, 3, 7)]
    counts = compare_in_one_engine(vl_checkpoint, 21, MANY, cases, **RANKS[ranks])
    found = dict(zip(cases, counts, strict=True))
    print(f"{ranks}: accepted {found}")
    assert all((count > 0) == (kind != "wrong") for (kind, _), count in found.items())


@pytest.mark.long
@pytest.mark.parametrize("policy", ["", "padded"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefixes", [True, False])
def test_a_thousand_requests_have_equal_answers(vl_checkpoint: Path, depth: int, policy: str, prefixes: bool) -> None:
    cases = [(kind, k) for kind in SOURCES for k in (1, 3, 7)]
    counts = compare(vl_checkpoint, 11, 250, cases, async_depth=depth, policy=policy, enable_prefix_caching=prefixes)
    found = dict(zip(cases, counts, strict=True))
    print(f"depth {depth}, policy {policy or 'serving'}, prefix cache {prefixes}: accepted {found}")
    assert all((count > 0) == (kind != "wrong") for (kind, _), count in found.items())


def answer(engine: Engine, request: Request) -> list[int]:
    """The tokens of one request."""
    engine.add(request)
    found: list[int] = []
    while not engine.idle():
        for delta in engine.step():
            assert delta.finish != "error", delta.message
            found += delta.tokens
        for request_id, index in engine.needs():
            engine.add_media(request_id, index, pixels(request.spans[index]))
    return found


def test_counts_after_each_step_are_those_of_accepted_tokens(vl_checkpoint: Path) -> None:
    """Penalties read them: neither rejected drafts nor a draft twice."""
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5, max_tokens=30, seed=4, ignore_eos=True)
    engine = engine_of(vl_checkpoint, speculation=False)
    tokens = answer(engine, Request("r", [5, 6, 7], params))
    engine.close()
    engine = engine_of(vl_checkpoint)
    draft_by(engine, {("r", 0): tokens}, "mixed", 5)
    rank: Any = engine.executor._rank  # type: ignore[attr-defined]
    engine.add(Request("r", [5, 6, 7], params))
    found: list[int] = []
    while not engine.idle():
        found += [token for delta in engine.step() for token in delta.tokens]
        counts = rank.model.persistent.state.counts
        seen = {at: found.count(at) for at in set(found)}
        held = counts[1:].sum(0)
        assert {at: int(held[at]) for at in seen} == seen and int(held.sum()) == len(found)
    assert found == tokens and engine.scheduler.totals.spec_accepted > 10
    engine.close()


def test_a_prediction_is_verified_and_changes_no_answer(vl_checkpoint: Path) -> None:
    engine = engine_of(vl_checkpoint, speculation=False)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    tokens = answer(engine, Request("r", [5, 6, 7], params))
    assert engine.scheduler.steps == 40
    engine.close()
    engine = engine_of(vl_checkpoint, spec_always=True)
    predicted = [token + (at % 10 == 9) for at, token in enumerate(tokens)]
    assert answer(engine, Request("r", [5, 6, 7], params, prediction=predicted)) == tokens
    assert engine.scheduler.steps < 20
    engine.close()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"speculative_config": {"method": "ngrm"}}, "did you mean ngram?"),
        ({"speculative_config": {"k": 3}}, "unknown key 'k'"),
        ({"spec_method": "medusa"}, "medusa is not built"),
        ({"spec_method": "eagle3"}, "--spec-model must be the folder of a checkpoint for eagle3"),
        ({"speculative_config": {"num_speculative_tokens": 17}}, r"in \[1, 16\], got 17"),
        ({"speculative_config": {"num_speculative_tokens": 0}}, r"in \[1, 16\], got 0"),
        ({"ngram_prompt_lookup_min": 5, "ngram_prompt_lookup_max": 4}, "must not be greater"),
        (
            {"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 4}},
            r"prompt_lookup_min \(5\) must not be greater than .*prompt_lookup_max \(4\)",
        ),
        ({"speculative_config": {"method": "ngram"}, "spec_tokens": 2}, "give one"),
        ({"speculation": False, "spec_tokens": 2}, "contradict"),
    ],
)
def test_what_is_not_served_stops_the_start_in_one_line(vl_checkpoint: Path, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says) as error:
        engine_of(vl_checkpoint, **{"batch_invariant": False, **flags})
    assert "\n" not in str(error.value)
