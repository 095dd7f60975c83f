"""What ``SamplingParams`` hold of vLLM's objects: forms of answers (for offline callers), and repetitions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trencadis.core.errors import BadRequest

MAX_PATTERN = 1024
"""Bound of the numbers of ``RepetitionDetectionParams``: what a token may cost to compare."""


@dataclass(slots=True)
class StructuredOutputsParams:
    """One form of answer, and blanks in its JSON.

    Args:
        json: a JSON schema, or its text.
        regex: that the whole answer matches.
        choice: texts, of which the answer is one.
        grammar: in GBNF (``root ::= ...``) or Lark (``start: ...``).
        json_object: whether the answer is any JSON object.
        structural_tag: tags whose content has a form, or its JSON text.
        disable_any_whitespace: no blanks between the parts of a JSON text; else one space, or a line break and its
            indentation.
        disable_additional_properties: objects that list properties have no others, unless they say so.
        whitespace_pattern: a regex of the blanks at a place.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool = field(default=False, repr=False)
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def as_fields(self) -> dict[str, Any]:
        """The fields that are set, as a request has them."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if value not in (None, False)}


@dataclass(slots=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The older name of the same. ``backend`` chose among libraries and has no effect."""

    backend: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class RepetitionDetectionParams:
    """Ends an answer whose last tokens are one pattern again and again.

    Args:
        max_pattern_size: tokens of the longest pattern; 0: nothing is detected.
        min_pattern_size: of the shortest; 0 is 1.
        min_count: times that it must stand there, at least 2.

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
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
                raise BadRequest(
                    f"repetition_detection.{name} must be in [{low}, {most}], got {value!r}.",
                    param="repetition_detection",
                )
