"""vLLM's objects in ``SamplingParams``: forms of answers (for offline callers), and repetition detection."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonObject

MAX_PATTERN = 1024
"""Limit of the numbers in ``RepetitionDetectionParams``, which bounds the cost of the comparison per token."""


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
