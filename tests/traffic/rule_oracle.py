"""What a rule lets a choice draw, worked out anew from its whole output each time; and a vocabulary of sixty ids."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np

from trencadis.core.output_constraints import Rule
from trencadis.core.request import SamplingParams
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import Vocabulary, open_tokenizer

EOS = 0
THINK, END = 56, 57
TOKENS = [
    b"<eos>", *(bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz0123456789"), *(bytes([c]) for c in b'{}":, \n[]'),
    b"ab", b"a1", b'":', b'",', b'{"', b"xy", b"aa", b"bc", b"cd", b"12", b"<think>", b"</think>", b"", b"zz",
]  # fmt: skip
VOCABULARY = Vocabulary(TOKENS, [EOS, THINK, END], [EOS])
assert len(TOKENS) == 60


def _ends(output: Sequence[int], ids: Sequence[int]) -> bool:
    return len(output) >= len(ids) and list(output[len(output) - len(ids) :]) == list(ids)


def forced(rule: Rule, output: Sequence[int]) -> int | None:
    """The id that a thinking budget forces."""
    budget = rule.thinking
    assert budget is not None
    begun = 0 if budget.open else None
    for at in range(1, len(output) + 1):
        if begun is None:
            begun = at if budget.start and _ends(output[:at], budget.start) else None
        elif _ends(output[:at], budget.end):
            begun = None
    if begun is None or len(output) - begun < budget.tokens:
        return None
    said = max(n for n in range(len(budget.end)) if _ends(output, budget.end[:n]))
    return budget.end[said]


class RuleOracle:
    """Rules over a vocabulary.

    Args:
        eos: ids that end a text.
    """

    def __init__(self, vocabulary: Vocabulary, eos: Sequence[int]) -> None:
        self.eos, self.vocab = set(eos), len(vocabulary.tokens)
        self._vocabulary = vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._begun: dict[str, llguidance.LLMatcher] = {}

    def grammar_mask(self, grammar: str, output: Sequence[int]) -> tuple[set[int], bool]:
        """Ids that may follow, and whether the text may end."""
        if grammar not in self._begun:
            self._tokenizer = self._tokenizer or open_tokenizer(self._vocabulary)
            self._begun[grammar] = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        matcher = self._begun[grammar].deep_copy()
        for at, token in enumerate(output):
            assert matcher.consume_token(token), f"{list(output)} leaves the grammar at {at}"
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return set(bits.nonzero()[0].tolist()), matcher.is_accepting()

    def may_draw(self, rule: Rule, params: SamplingParams, output: Sequence[int]) -> set[int]:
        """Ids that may come next; none: the choice fails."""
        left = set(range(self.vocab))
        if rule.grammar:
            left, accepting = self.grammar_mask(rule.grammar, output)
            if accepting:
                left |= set(params.stop_token_ids)
        if rule.allowed:
            left &= {*rule.allowed, *(self.eos if rule.grammar else ())}
        for word in rule.words:
            if _ends(output, word[:-1]):
                left.discard(word[-1])
        if rule.thinking is not None:
            end = forced(rule, output)
            left = {end} if end in left else left
        banned = set[int]()
        if len(output) < params.min_tokens:
            banned = {*self.eos, *params.stop_token_ids}
        elif params.ignore_eos and rule.grammar:
            banned = self.eos
        return left - banned or left

    def over(self, rule: Rule, params: SamplingParams, output: Sequence[int]) -> str:
        """Why a choice ends after the last token of ``output``; empty: it goes on."""
        last, before = output[-1], output[:-1]
        if rule.grammar:
            if last in self.eos or (last in params.stop_token_ids and self.grammar_mask(rule.grammar, before)[1]):
                return "stop"
        elif last in params.stop_token_ids or (last in self.eos and not params.ignore_eos):
            return "stop"
        if len(output) >= (params.max_tokens or 1 << 30):
            return "length"
        found = rule.repetition
        if found is not None and len(output) >= params.min_tokens:
            for size in range(found.least, found.most + 1):
                tail = list(output[-size * found.count :])
                if len(tail) == size * found.count and tail == tail[:size] * found.count:
                    return "repetition"
        return ""


SIXTY = RuleOracle(VOCABULARY, (EOS,))
