"""Forms of answers and repetition detection: vLLM's objects in ``SamplingParams``, and the rules sent to every rank.

The rules constrain what a choice may sample, beyond its sampling parameters. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonObject

MAX_PATTERN = 1024
"""Limit of the numbers in ``RepetitionDetectionParams``, which bounds the cost of the comparison per token."""


LIBRARY_FAILED = "the grammar library failed: "
"""Beginning of the reasons of failed choices that are faults of this server, not of what the request asks for."""


def find_failure_status(reason: str) -> int:
    """Returns the HTTP status of a choice that its constraints end: 400, except for faults of this server (500)."""
    return 500 if reason.startswith(LIBRARY_FAILED) else 400


@dataclass(slots=True)
class StructuredOutputsParams:
    """The form of an answer, and the white space in its JSON.

    Args:
        json: a JSON schema, or its text.
        regex: a pattern that the whole answer must match.
        choice: texts; the answer is one of them.
        grammar: a grammar in GBNF (``root ::= ...``) or Lark (``start: ...``).
        json_object: True if the answer may be any JSON object.
        structural_tag: tags whose content has a form, or its JSON text.
        disable_any_whitespace: no blanks between the parts of a JSON text; else one space, or a line
            break and its indentation.
        disable_additional_properties: objects that list properties have no others, unless they say so.
        whitespace_pattern: a regex of the blanks at a place.
    """

    json: JsonObject | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: JsonObject | str | None = None
    disable_fallback: bool = field(default=False, repr=False)
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def as_fields(self) -> JsonObject:
        """Returns the fields that are set, in the form of a request."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if value not in (None, False)}


@dataclass(slots=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The older name of ``StructuredOutputsParams``. ``backend`` selected a library and has no effect."""

    backend: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class RepetitionDetectionParams:
    """Ends an answer whose last tokens repeat one pattern.

    Args:
        max_pattern_size: length of the longest pattern in tokens; 0: detection is off.
        min_pattern_size: length of the shortest pattern; 0 counts as 1.
        min_count: number of repetitions, at least 2.

    Raises:
        BadRequest: a value is out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name, low, most in (
            ("max_pattern_size", 0, MAX_PATTERN),
            ("min_pattern_size", 0, self.max_pattern_size),
            ("min_count", 2 if self.max_pattern_size else 0, MAX_PATTERN),
        ):
            value: Json = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
                raise BadRequest(
                    f"repetition_detection.{name} must be in [{low}, {most}], got {value!r}.",
                    param="repetition_detection",
                )


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
