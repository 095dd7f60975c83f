"""Finds the answer format that a request asks for, under all the names that clients use for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping
from trencadis.server.grammars.lark_grammar_and_tool_functions import WhitespaceRule
from trencadis.server.grammars.regex_translation import translate_regex

LARGEST = 256 << 10
"""Maximum bytes of a schema, regex or grammar, and of all schemas of a request's tools together."""
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
IGNORED_OPTIONS = ("disable_fallback", "backend", "_backend", "_backend_was_auto", "backend_was_auto")
"""Fields of vLLM that select one of its libraries; ignored here."""
GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")} | {
    "structural_tag": "structural_tag"
}
_BLANK = re.compile(r"\\(?:x20|x09|x0[aAdD]|[tnrs])|\{[0-9]{0,4},?[0-9]{0,4}\}")
_TYPES = ("text", "json_object", "json_schema", "structural_tag", "grammar", "regex")


@dataclass(frozen=True, slots=True)
class RequestedFormat:
    """The requested format of an answer.

    Args:
        kind: one of ``KINDS``.
        value: the schema, regex, choices, grammar or tag, as the request has it.
        where: JSON path of ``value``.
        closed: True if objects that list properties have no others.
    """

    kind: str
    value: Json
    where: str
    spaces: WhitespaceRule = WhitespaceRule()
    closed: bool = False


def find_requested_format(
    response_format: JsonMapping | None,
    structured: JsonMapping | None,
    guided: JsonMapping,
    usual: JsonMapping | None = None,
) -> RequestedFormat | None:
    """Returns the one format that a request asks for; None without a format.

    Args:
        structured: ``structured_outputs``.
        guided: the older fields that are set, by name.
        usual: default options (of ``OPTIONS``).

    Raises:
        BadRequest: there are two formats, or one is invalid.
    """
    found = [
        one
        for one in (
            _read_response_format(response_format),
            *_read_structured_outputs(structured),
            *_read_guided_fields(guided),
        )
        if one
    ]
    if len(found) > 1:
        names = " and ".join(where for _, _, where in found[:3])
        raise BadRequest(f"Only one form of answer can be asked for, got {names[:120]}.", param=found[1][2])
    options = {**(usual or {}), **{k: v for k, v in (structured or {}).items() if v is not None}}
    if guided.get("guided_whitespace_pattern") is not None:
        options["whitespace_pattern"] = guided["guided_whitespace_pattern"]
    spaces = _read_whitespace_options(options)
    if not found:
        return None
    kind, value, where = found[0]
    if (isinstance(value, str) and len(value) > LARGEST) or (not isinstance(value, str) and _measure(value) > LARGEST):
        raise BadRequest(f"{where} exceeds {LARGEST >> 10} KB.", param=where)
    return RequestedFormat(kind, value, where, spaces, bool(options.get("disable_additional_properties")))


def _measure(value: Json) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


_Found = tuple[str, Json, str]


def _read_response_format(given: JsonMapping | None) -> _Found | None:
    """Reads ``response_format``."""
    if not given:
        return None
    kind, param = given.get("type"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        # Some clients put a schema here.
        schema = given.get("schema")
        return ("json_object", True, param) if schema in (None, {}, True) else ("json", schema, f"{param}.schema")
    if kind == "json_schema":
        held = given.get("json_schema")
        if not isinstance(held, Mapping):
            raise BadRequest(f"{param}.json_schema must hold a name and a schema.", param=f"{param}.json_schema")
        schema = held.get("schema", held.get("json_schema"))
        if schema is None:
            raise BadRequest(f"{param}.json_schema.schema is missing.", param=f"{param}.json_schema.schema")
        return "json", schema, f"{param}.json_schema.schema"
    if kind == "structural_tag":
        return "structural_tag", given, param
    raise BadRequest(f"{param}.type {str(kind)[:40]!r} is none of {', '.join(_TYPES[:4])}.", param=f"{param}.type")


def _read_structured_outputs(given: JsonMapping | None) -> list[_Found]:
    """Reads ``structured_outputs``."""
    param = "structured_outputs"
    unknown = next((k for k in given or {} if k not in (*KINDS, *OPTIONS, *IGNORED_OPTIONS)), None)
    if unknown is not None:
        raise BadRequest(f"{param} has no field {unknown[:40]!r}.", param=f"{param}.{unknown[:40]}")
    return [(kind, given[kind], f"{param}.{kind}") for kind in KINDS if given and given.get(kind) not in (None, False)]


def _read_guided_fields(given: JsonMapping) -> list[_Found]:
    """Reads the names that vLLM had before ``structured_outputs``."""
    return [(kind, given[name], name) for name, kind in GUIDED.items() if given.get(name) is not None]


def _read_whitespace_options(options: JsonMapping) -> WhitespaceRule:
    pattern, where = options.get("whitespace_pattern"), "structured_outputs.whitespace_pattern"
    if pattern is not None and not isinstance(pattern, str):
        raise BadRequest(f"{where} must be a text.", param=where)
    if pattern:
        made = translate_regex(pattern, where)
        if len(pattern) > 128 or set(_BLANK.sub("", pattern)) - set(" \t\n\r[]()*+?|:"):
            raise BadRequest(f"{where} must be a short regex of blanks.", param=where)
        return WhitespaceRule(made)
    return WhitespaceRule("") if options.get("disable_any_whitespace") else WhitespaceRule()
