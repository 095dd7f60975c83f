"""What a choice may draw, beyond its sampling parameters. Torch-free; a rule travels to every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Most tokens of a thought; once they are spent, ``end`` is forced.

    Args:
        tokens: 0: the thought ends as soon as it begins.
        start: ids that begin a thought.
        end: ids that end it, at least one.
        open: whether the prompt ends within a thought.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    open: bool = False


@dataclass(frozen=True, slots=True)
class Repetition:
    """Ends a choice whose last tokens are one pattern, ``count`` times in a row.

    Args:
        least: tokens of the shortest pattern that counts, at least 1.
        most: tokens of the longest.
        count: at least 2.
    """

    least: int
    most: int
    count: int


@dataclass(frozen=True, slots=True)
class Rule:
    """Constraints of one request, all of them at once; each of its choices has matchers of its own.

    Args:
        grammar: of the whole output, in a form that ``llguidance.LLMatcher`` takes; empty: none. Once it can only
            end, the end of the text is all that may be drawn.
        allowed: ids that may be drawn (and the ids that end a choice); empty: all.
        words: sequences of ids that must not occur in the output.
    """

    grammar: str = ""
    allowed: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    thinking: ThinkingBudget | None = None
    repetition: Repetition | None = None

    @property
    def masks(self) -> bool:
        """Whether rows under this rule need a mask; a rule may also only watch."""
        return bool(self.grammar or self.allowed or self.words or self.thinking)
