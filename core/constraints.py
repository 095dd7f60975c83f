"""Constraints on what a choice may sample, beyond its sampling parameters. Torch-free; rules are sent to every rank.

Detects whether the last tokens of an answer repeat one pattern. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Largest number of thinking tokens; after that, ``end`` is forced.

    Args:
        tokens: the budget; 0: thinking ends as soon as it begins.
        start: ids that begin the thinking section.
        end: ids that end it; at least one.
        open: True if the prompt ends inside a thinking section.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    open: bool = False


@dataclass(frozen=True, slots=True)
class Repetition:
    """Ends a choice whose last tokens repeat one pattern ``count`` times in a row.

    Args:
        least: length of the shortest pattern in tokens, at least 1.
        most: length of the longest pattern.
        count: number of repetitions, at least 2.
    """

    least: int
    most: int
    count: int


@dataclass(frozen=True, slots=True)
class Rule:
    """The constraints of one request, which all apply; each of its choices has its own matchers.

    Args:
        grammar: grammar of the whole output, in a form that ``llguidance.LLMatcher`` accepts; empty: none. Once it can
            only end, only EOS may be sampled.
        allowed: ids that may be sampled, in addition to those that end a choice; empty: all.
        words: sequences of ids that must not occur in the output.
    """

    grammar: str = ""
    allowed: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    thinking: ThinkingBudget | None = None
    repetition: Repetition | None = None

    @property
    def masks(self) -> bool:
        """True if rows under this rule need a mask; repetition detection alone does not."""
        return bool(self.grammar or self.allowed or self.words or self.thinking)


def repeats(output: Sequence[int], rule: Repetition) -> bool:
    """Returns True if ``output`` ends in ``rule.count`` equal runs of ``rule.least`` to ``rule.most`` tokens."""
    end = len(output)
    for size in range(rule.least, min(rule.most, end // rule.count) + 1):
        span = size * (rule.count - 1)
        if output[end - 1] == output[end - 1 - size] and output[end - span :] == output[end - span - size : end - size]:
            return True
    return False
