"""Random requests with images, four in ten under a grammar, others with allowed ids, bans and budgets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import llguidance

from tests.traffic.requests import Traffic, random_request
from trencadis.core.engine.engine import Engine
from trencadis.core.output_constraints import Repetition, Rule, ThinkingBudget
from trencadis.core.request import Delta, Request
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import Vocabulary

LL = llguidance.LLMatcher
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": ["x", "ab", 12]}, "b": {"type": "boolean"}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
TIGHT = '{"x-guidance": {"whitespace_flexible": false}, "type": "object", "properties": {"n": {"type": "integer"}}}'
GRAMMARS = [
    LL.grammar_from_json_schema(SCHEMA),
    LL.grammar_from_json_schema(TIGHT),
    LL.grammar_from_regex("[a-z]{3,9}(-[0-9]{2})?"),
    LL.grammar_from_regex("(yes|no|perhaps|not at all)"),
    LL.grammar_from_lark('start: /[a-z]{0,5}/ </think> body\nbody: "{" /[0-9]{1,3}/ "}"'),
]


def vocabulary(vocab: int, eos: tuple[int, ...]) -> Vocabulary:
    """Bytes for ids that were never trained to mean any: single bytes first, then pairs of letters."""
    tokens = [bytes([i]) if i < 256 else bytes([97 + i % 26, 97 + i // 26 % 26]) for i in range(vocab)]
    for token in eos:
        tokens[token] = b"<eos>"
    begin, end = thought(vocab, eos)
    tokens[begin], tokens[end] = b"<think>", b"</think>"
    return Vocabulary(tokens, [*eos, begin, end], list(eos))


def thought(vocab: int, eos: tuple[int, ...]) -> tuple[int, int]:
    """The ids that begin and end a thought."""
    begin, end = [i for i in range(vocab - 5, vocab) if i not in eos][:2]
    return begin, end


def ruled(request: Request, rng: random.Random, vocab: int, eos: tuple[int, ...]) -> Request:
    """The request under a random rule, or under none."""
    kind = rng.choices(["grammar", "allowed", "words", "thinking", "repetition", ""], [8, 2, 3, 2, 1, 4])[0]
    rule = None
    if kind == "grammar":
        rule = Rule(grammar=rng.choice(GRAMMARS))
    elif kind == "allowed":
        rule = Rule(allowed=tuple(rng.sample(range(vocab), rng.choice([1, 9, vocab // 2]))))
    elif kind == "words":
        rule = Rule(words=tuple((rng.randrange(vocab),) for _ in range(vocab // 3)) + ((5, 7), (7, 5, 9)))
    elif kind == "thinking":
        begin, end = thought(vocab, eos)
        rule = Rule(thinking=ThinkingBudget(rng.choice([0, 3]), (begin,), (end, 10, end), rng.random() < 0.7))
    elif kind == "repetition":
        rule = Rule(allowed=(3, 4), repetition=Repetition(1, 3, 2))
    params = replace(
        request.params, max_tokens=rng.choice([4, 12, 16]), ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 3]),
    )  # fmt: skip
    return replace(request, rule=rule, params=params)


@dataclass
class RuledTraffic(Traffic):
    """``Traffic`` whose requests are ``ruled``; notes them, and why each choice ended."""

    asked: dict[str, Request] = field(default_factory=dict)
    why: dict[tuple[str, int], str] = field(default_factory=dict)

    def request(self, rng: random.Random) -> Request:
        """Request number ``sent``."""
        made = random_request(rng, self.sent, self.length, self.vocab, self.most)
        self.asked[made.id] = ruled(made, rng, self.vocab, self.engine.scheduler.limits.eos)
        return self.asked[made.id]

    def take(self, delta: Delta) -> None:
        """Notes the end too."""
        super().take(delta)
        if delta.finish:
            self.why[delta.id, delta.choice] = delta.finish


def ruled_answers(engine: Engine, count: int, seed: int, length: int, **options: object) -> RuledTraffic:
    """What a run of ruled requests answers."""
    vocab = engine.info().vocab_size
    engine.set_vocabulary(vocabulary(vocab, engine.scheduler.limits.eos).pack())
    run = RuledTraffic(engine, seed, count, length, vocab, **options)  # type: ignore[arg-type]
    run.run()
    return run
