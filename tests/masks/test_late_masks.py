"""Random schedules under random rules: whatever is preempted, forked, chunked or aborted, each token keeps its rule."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import llguidance
import numpy as np
import pytest

from tests.engine.test_schedules import random_request
from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from tests.oracles.shadow_model import ShadowRank, oracle_end
from tests.traffic.rule_oracle import END, EOS, SIXTY, THINK, VOCABULARY
from trencadis.core.launches import greedy_and_masked_sample_launches
from trencadis.core.launches.host_inputs import head_inputs
from trencadis.core.output_constraints import Repetition, Rule, ThinkingBudget
from trencadis.core.request import Delta, Request, SamplingParams
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.token_masks.grammar_matcher import CompiledGrammars, GrammarMatcher
from trencadis.core.token_masks.matcher_manager import ChoiceMasks, MatcherManager, PendingSample
from trencadis.core.token_masks.token_rule_matchers import BadWords, ThinkingMatcher, remove

KINDS = ["grammar", "allowed", "words", "thinking", "repetition"]
LL = llguidance.LLMatcher
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "ab", 12]}}, "required": ["a"]}
GRAMMARS = [
    LL.grammar_from_regex("[a-z]{3,6}"),
    LL.grammar_from_regex("(ab|cd)*x?"),
    LL.grammar_from_regex("[a-z0-9]{2,}"),
    LL.grammar_from_regex("a|bc|bcd"),
    LL.grammar_from_json_schema(SCHEMA),
    LL.grammar_from_lark('start: thought body\nthought: /[a-z]*/ </think>\nbody: "{" /[0-9]{1,3}/ "}"'),
]


def random_rule(rng: random.Random) -> Rule:
    """Mostly one constraint, sometimes several, which may leave nothing to draw."""
    ids = range(1, VOCAB)
    kinds = rng.choices(KINDS, [5, 1, 1, 1, 1], k=rng.choice([1, 1, 2]))
    end = rng.choice([(END,), (END, 7), (9, 9, END)])
    thinking = ThinkingBudget(rng.choice([0, 2, 5]), (THINK,), end, rng.random() < 0.5)
    words = tuple(tuple(rng.choices(ids, k=rng.choice([1, 2, 3]))) for _ in range(3))
    words += tuple((rng.choice(ids), rng.choice(ids)) for _ in range(rng.choice([0, 900])))
    return Rule(
        grammar=rng.choice(GRAMMARS) if "grammar" in kinds else "",
        allowed=tuple(rng.sample(ids, rng.choice([1, 5, 30]))) if "allowed" in kinds else (),
        words=words if "words" in kinds else (),
        thinking=thinking if "thinking" in kinds else None,
        repetition=Repetition(1, rng.choice([1, 4]), 2) if "repetition" in kinds else None,
    )


class RuledDriver(ScheduleDriver):
    """Takes errors too, and holds answers, ends and what was drawn behind ends to the oracle."""

    def take(self, deltas: list[Delta]) -> None:
        for d in deltas:
            key = (d.id, d.choice)
            assert key not in self.ended, "a choice spoke after its end"
            self.got[key] += d.tokens
            if d.finish:
                self.ended[key] = d.finish

    def verify(self) -> None:
        self.engine.scheduler.check()
        assert set(self.ended) == set(self.got)
        for (request_id, number), tokens in self.got.items():
            request = self.requests[request_id]
            want, end = oracle_end(request, number, request.params.seed or 0, (EOS,), VOCAB, self.length)
            ended = self.ended[request_id, number]
            if ended == "abort":
                assert tokens == want[: len(tokens)]
            else:
                assert (tokens, ended) == (want, end), f"{request_id}/{number}"


def play(seed: int, count: int, depth: int, overlaps: bool = False, **more: Any) -> tuple[RuledDriver, ShadowRank]:
    """Random ruled requests, held to the oracle; ``more``: what is drafted (``shadow_engine``)."""
    rng = random.Random(seed)
    length = rng.choice([48, 96])
    size = rng.choice([2, 4, 8])
    least = -(-length // size)
    engine, rank = shadow_engine(
        blocks=least + rng.choice([0, 1, least]), size=size, rows=2 + rng.choice([12, 40]), depth=depth,
        seqs=rng.choice([3, 8]), tokens=rng.choice([7, 64]), length=length, caching=rng.random() < 0.8,
        chunk=rng.choice([0, 0, 1, 5]), overlaps=overlaps, **more,
    )  # fmt: skip
    engine.set_vocabulary(VOCABULARY.pack())
    driver = RuledDriver(engine, rng, length, media_delay=rng.choice([0.0, 0.5]))
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(length)] for _ in range(3)]
    for number in range(count):
        request = random_request(rng, number, length, images=rng.choice([0, 3]), prefixes=prefixes)
        least = min(rng.choice([0, 0, 4]), request.params.max_tokens or 4)
        stops = rng.choice([request.params.stop_token_ids, rng.sample(range(1, 37), 6)])
        params = replace(request.params, min_tokens=least, stop_token_ids=stops)
        rule = random_rule(rng) if rng.random() < 0.8 else None
        driver.add(replace(request, params=params, rule=rule))
        for _ in range(rng.choice([0, 0, 1, 3, 10])):
            driver.run_step()
        if rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(number + 1)}", rng.choice([-1, -1, 0, 1]))
    driver.finish()
    driver.add(Request("last", [1], SamplingParams(max_tokens=2, seed=1)))  # a step that closes what has left
    driver.finish()
    assert not len(rank.matchers), "the matcher manager follows choices that have left"
    driver.verify()
    if not more:  # forced ids are not drawn
        check_surplus(rank)
    return driver, rank


def check_surplus(rank: ShadowRank) -> None:
    """What is drawn for a choice that a grammar has ended is EOS."""
    for handle, drawn in rank.drawn.items():
        opening = rank.openings[handle]
        if opening.rule.grammar:
            endless = SamplingParams(max_tokens=None, stop_token_ids=list(opening.stops))
            ends = (at for at in range(1, len(drawn)) if SIXTY.over(opening.rule, endless, drawn[:at]) == "stop")
            assert set(drawn[next(ends, len(drawn)) :]) <= {EOS}


RUNS = [(0, 0, False), (1, 0, False), (2, 1, False), (3, 1, False), (4, 1, True), (5, 1, True)]


@pytest.mark.parametrize(("seed", "depth", "overlaps"), RUNS)
def test_every_token_keeps_its_rule(seed: int, depth: int, overlaps: bool) -> None:
    play(seed, 25, depth, overlaps)


@pytest.mark.long
@pytest.mark.parametrize(("depth", "overlaps"), [(0, False), (1, False), (1, True)])
def test_ten_thousand_ruled_requests(depth: int, overlaps: bool) -> None:
    total, preempted, ends = 0, 0, Counter[str]()
    for seed in range(50):
        driver, _ = play(1000 + seed, 200, depth, overlaps)
        total += len(driver.requests)
        preempted += driver.engine.scheduler.totals.preemptions
        ends.update(driver.ended.values())
    print(f"depth {depth}, overlaps {overlaps}: {total} requests, {preempted} preemptions, {dict(ends)}")
    assert total >= 10_000 and preempted > 100 and len(ends) == 5


def late(self: ChoiceMasks, token: int) -> bool:
    """``ChoiceMasks.accept`` of the token before."""
    before, self.__dict__["held"] = self.__dict__.get("held"), token
    return False if before is None else accept(self, before)


accept = ChoiceMasks.accept


def neighbours(rows: Any, vocab: int, fill: Any = None) -> Any:
    """``head_inputs`` whose masks are a row off."""
    made = head_inputs(rows, vocab, fill)
    if fill is not None:
        made.mask_row = np.minimum(made.mask_row + 1, len(made.masks) - 1).astype(np.int32)
    return made


def shared(self: CompiledGrammars, text: str) -> GrammarMatcher:
    """``CompiledGrammars.matcher`` without a copy."""
    return GrammarMatcher(self.initial_matcher(text), 8)


step = MatcherManager.apply
opening = Sequence.opening
take = PendingSample.accept_tokens


def mixed_up(self: PendingSample) -> None:
    """``PendingSample.accept_tokens`` of its rows in the other order."""
    self.rows = dict(zip(self.rows, reversed([*self.rows.values()]), strict=True))
    take(self)


def with_bans(self: ChoiceMasks, row: Any, banned: Any = ()) -> None:
    """``ChoiceMasks.fill`` that lets min_tokens keep a finished grammar from its end."""
    fill(self, row, ())
    remove(row, banned)
    if not row.any():
        row[:] = 255


fill = ChoiceMasks.fill
thinking = ThinkingMatcher.__init__
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "a mask one step late": (ChoiceMasks, "accept", late),
    "the mask of the neighbour": (greedy_and_masked_sample_launches, "head_inputs", neighbours),
    "tokens of another row": (PendingSample, "accept_tokens", mixed_up),
    "anything behind an end": (ChoiceMasks, "ended", False),
    "choices share one matcher": (CompiledGrammars, "matcher", shared),
    "a preempted choice starts anew": (Sequence, "opening", lambda s: replace(opening(s), output=())),
    "a preempted choice is told its output twice": (
        Sequence, "opening", lambda s: replace(opening(s), output=2 * opening(s).output)
    ),
    "choices are never closed": (MatcherManager, "apply", lambda self, closings, openings: step(self, (), openings)),
    "min_tokens is forgotten": (ChoiceMasks, "fill", lambda self, row, banned=(): fill(self, row)),
    "min_tokens wins over a finished grammar": (ChoiceMasks, "fill", with_bans),
    "stop ids end within a grammar": (PendingSample, "text", property(lambda s: set(), lambda s, value: None)),
    "a failure is kept silent": (PendingSample, "failures", property(lambda s: {}, lambda s, value: None)),
    "words forget what was drawn": (BadWords, "accept", lambda self, token: True),
    "every thought begins in the output": (
        ThinkingMatcher, "__init__", lambda self, b, *more: thinking(self, replace(b, open=False), *more)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, made = MISTAKES[name]
    monkeypatch.setattr(owner, attribute, made)
    for seed in range(12):
        try:
            play(seed, 12, 1)
        except (AssertionError, KeyError):
            return
    raise RuntimeError("nobody noticed")
