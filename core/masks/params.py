"""How offline callers ask for a form of answer: ``SamplingParams(structured_outputs=...)``, as vLLM has it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


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
        disable_any_whitespace: no blanks between the parts of a JSON text; else at most 16, or a line break and 32.
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
