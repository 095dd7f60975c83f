"""Ids that masks force: answers under the grammars of the corpus are those in which each id was drawn."""

from __future__ import annotations

import random
from typing import Any, cast

import llguidance
import pytest

from benchmarks.speculation import SCHEMA
from tests.random_inputs.grammar_draws import GrammarDraws
from tests.random_inputs.masked_answers import write_grammars
from trencadis import LLM
from trencadis.core.output_constraints import Rule
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.spec.spec_config import SpeculationConfig

FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "batch_invariant": True,
    "kv_cache_memory_bytes": 32 << 20,
}  # fmt: skip
MOST = 96
Answers = dict[str, tuple[list[int], str]]


def answers(grammars: list[str], speculation: SpeculationConfig | None) -> Answers:
    """Ids and end of an answer under each grammar, greedy or sampled, some with penalties."""
    llm = LLM(**FLAGS)
    engine, found = llm.engine, dict[str, tuple[list[int], str]]()
    scheduler = engine.scheduler
    scheduler.drafting = None
    if speculation is not None:
        scheduler.drafting = DraftScheduler(speculation, scheduler.limits, scheduler.totals)
    draws = GrammarDraws(cast(Any, llm.get_tokenizer()))
    engine.set_vocabulary(draws.vocabulary.pack())
    for number, grammar in enumerate(grammars):
        rng = random.Random(number)
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), max_tokens=rng.choice([7, MOST]), seed=number,
            presence_penalty=rng.choice([0.0, 0.0, 0.5]), min_tokens=rng.choice([0, 0, 5]),
        )  # fmt: skip
        engine.add(Request(f"r{number}", [20 + number % 50, 30, 40], params, rule=Rule(grammar=grammar)))
        found[f"r{number}"] = ([], "")
    while not engine.idle():
        for delta in engine.step():
            ids, _ = found[delta.id]
            ids += delta.tokens
            found[delta.id] = (ids, delta.finish or delta.message)
    scheduler.check()
    llm.close()
    return found


def corpus(count: int) -> list[str]:
    llm = LLM(**FLAGS)
    draws = GrammarDraws(cast(Any, llm.get_tokenizer()))
    llm.close()
    return [grammar for _, grammar in write_grammars(draws, count)]


def compare(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = corpus(count)
    forced: list[int] = []
    append = Sequence.append_forced

    def noted(seq: Sequence, token: int) -> None:
        forced.append(token)
        append(seq, token)

    monkeypatch.setattr(Sequence, "append_forced", noted)
    plain = answers(grammars, None)
    free = answers(grammars, SpeculationConfig("", 0, forced=32))
    assert free == plain
    tokens, taken = sum(len(ids) for ids, _ in plain.values()), len(forced)
    assert taken > 0.05 * tokens
    drafted = answers(grammars, SpeculationConfig("ngram", 3, always=True, forced=32))
    assert drafted == plain
    print(f"{len(grammars)} grammars: masks forced {taken} of {tokens} ids")


def test_answers_under_some_grammars_are_equal_with_forced_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(16, monkeypatch)


def test_most_ids_of_a_schema_with_long_names_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of eight fields and what stands between the values; docs/speculation.md has the figure."""
    monkeypatch.setitem(FLAGS, "max_model_len", 1024)
    llm, forced, append = LLM(**FLAGS), list[int](), Sequence.append_forced

    def noted(seq: Sequence, token: int) -> None:
        forced.append(token)
        append(seq, token)

    monkeypatch.setattr(Sequence, "append_forced", noted)
    engine = llm.engine
    scheduler = engine.scheduler
    scheduler.drafting = DraftScheduler(SpeculationConfig("", 0, forced=32), scheduler.limits, scheduler.totals)
    engine.set_vocabulary(GrammarDraws(cast(Any, llm.get_tokenizer())).vocabulary.pack())
    rule = Rule(grammar=llguidance.LLMatcher.grammar_from_json_schema(SCHEMA))
    for seed in range(8):
        params = SamplingParams(temperature=1.0 if seed else 0.0, max_tokens=600, seed=seed)
        engine.add(Request(f"r{seed}", [20 + seed, 30, 40], params, rule=rule))
    tokens = 0
    while not engine.idle():
        for delta in engine.step():
            assert delta.finish in (None, "stop")
            tokens += len(delta.tokens)
    llm.close()
    print(f"{len(forced)} of {tokens} ids were forced in {scheduler.steps} steps")
    assert len(forced) > 0.8 * tokens and tokens > 8 * scheduler.steps / 2


@pytest.mark.long
def test_answers_under_a_thousand_grammars_are_equal_with_forced_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(1000, monkeypatch)
