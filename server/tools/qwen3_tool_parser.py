"""Parser of the calls of Qwen3-Coder and Qwen3.5: ``<function=f>``, then ``<parameter=key>`` and a text for each.

Values of parameters in Qwen3's calls: their JSON types, and the grammar rule of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping
from trencadis.server.grammars.lark_grammar_and_tool_functions import (
    ANY,
    GrammarWriter,
    ToolFunction,
    ToolParameter,
    quoted,
)
from trencadis.server.grammars.regex_translation import escaped
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools.json_tool_parsers import CLOSE, OPEN
from trencadis.server.tools.tool_parser import ToolParser

END = "</parameter>"
DEPTH = 3
"""Most nested references and choices that are followed."""
_TEXT = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "$defs"})


def find_types(schema: Json, root: Json = None, depth: int = DEPTH) -> set[str]:
    """Returns the JSON types that a schema allows; empty if neither it nor a reference within ``root`` names one."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {one for one in named if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        some = schema.get(key)
        if isinstance(some, list):
            found = [find_types(one, root, depth - 1) for one in some if one is not schema][:64]
            return set() if not all(found) else set().union(*found)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_get_type(one) for one in values}
    return find_types(_resolve_ref(schema.get("$ref"), root), root, depth - 1)


def _get_type(value: Json) -> str:
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _resolve_ref(ref: Json, root: Json) -> Json:
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    for part in ref[2:].split("/"):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def write_value_rule(writer: GrammarWriter, parameter: ToolParameter) -> str:
    """Writes the rule of a parameter's value and the mark that ends it.

    Raises:
        BadRequest: this form cannot distinguish the types, or has no grammar for the schema.
    """
    types = find_types(parameter.schema, parameter.schema)
    if types == {"string"}:
        return writer.add_rule(f"{_add_text_terminal(writer, parameter)} {quoted(chr(10) + END)}", "lazy")
    if types and "string" not in types:
        return writer.add_rule(f"{writer.add_json(parameter.schema)} {quoted(chr(10) + END)}")
    if types == {"string", "null"} and _allows_any_text(parameter.schema):
        return writer.add_rule(f"{writer.write_free_text(END)} {quoted(chr(10) + END)}", "lazy")
    raise BadRequest(
        f"{parameter.where}: in this form of calls a grammar takes one type, or a text or null.", param=parameter.where
    )


def _allows_any_text(schema: JsonMapping) -> bool:
    """Returns True if the schema allows any text."""
    options = schema.get("anyOf", [{"type": "string"}])
    return all(one in ({"type": "string"}, {"type": "null"}) for one in options) and not set(schema) & (
        _TEXT - {"type", "$defs"}
    )


def _add_text_terminal(writer: GrammarWriter, parameter: ToolParameter) -> str:
    """Adds the terminal of a text without quotes."""
    schema = parameter.schema
    seen = 0
    while "$ref" in schema and set(schema) <= {"$ref", "$defs"} and seen < DEPTH:
        schema, seen = _resolve_ref(schema["$ref"], parameter.schema) or {}, seen + 1
    if not set(schema) <= _TEXT:
        name = sorted(set(schema) - _TEXT)[0]
        raise BadRequest(f"{parameter.where}.{name} has no grammar in this form of calls.", param=parameter.where)
    parts = [f"~/{ANY}{escaped(END)}{ANY}/", f"/{ANY}/"]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = [escaped(one) for one in values if isinstance(one, str) and END not in one]
        if not texts:
            raise BadRequest(
                f"{parameter.where}: in this form of calls a grammar takes texts without {END} as constants.",
                param=parameter.where,
            )
        parts.append(f"/{'|'.join(texts)}/")
    return writer.add_terminal(" & ".join([*parts, *list_text_regexes(schema, parameter.where)]))


def list_text_regexes(schema: JsonMapping, where: str) -> list[str]:
    """Returns the regexes, as terminals, of texts that ``pattern`` and the lengths of a schema allow.

    Raises:
        BadRequest: no text is that long.
    """
    made = [f"/{make_search_regex(schema['pattern'])}/"] if "pattern" in schema else []
    if "minLength" in schema or "maxLength" in schema:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if most != "" and most < least:
            raise BadRequest(f"{where}: minLength ({least}) is greater than maxLength ({most}).", param=where)
        made.append(f"/(?s:.{{{least},{most}}})/")
    return made


def make_search_regex(pattern: str) -> str:
    """Returns a regex of whole texts in which ``pattern`` is found; with alternatives, of texts that it matches as a
    whole.
    """
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if "|" in pattern:
        return pattern
    inner = pattern[start : len(pattern) - end if end else None]
    return f"{'' if start else ANY}(?:{inner}){'' if end else ANY}"


FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NEXT = (PARAMETER, END_FUNCTION, CLOSE)
"""Marks that may follow a value."""
_KEY = re.compile(r"[^>\n]*+")
_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int, float),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Qwen3ToolParser(ToolParser):
    """Reads parameters as strings or JSON, by their schema; text that is not JSON of the schema's types is a string."""

    tags = (OPEN, CLOSE)
    stop_marks = (CLOSE, OPEN)
    mark = OPEN

    @classmethod
    def call_rule(cls, writer: GrammarWriter, function: ToolFunction) -> str:
        """Writes each parameter between lines of its own, the form in which templates show it."""
        items = []
        for one in function.list_parameters():
            if set(one.name) & set(">\n"):
                raise BadRequest(f"{one.where}: such a name has no place in this form of calls.", param=one.where)
            head = f"{writer.write_text(PARAMETER)} {quoted(one.name + '>' + chr(10))}"
            rule = writer.add_rule(f"{head} {write_value_rule(writer, one)} {quoted(chr(10))}")
            items.append(rule + ("" if one.required else "?"))
        head = writer.write_text(f"\n{FUNCTION}{function.name}>\n")
        return writer.add_rule(f"{head} {' '.join(items)} {writer.write_text(END_FUNCTION + chr(10) + CLOSE)}")

    def parse(self) -> Wait[None]:
        """Reads content, with calls between tags; some models leave out the outer tags."""
        while True:
            mark = yield from self.read_content_until(OPEN, FUNCTION)
            if not mark:
                return
            yield from self.try_calls(self._read_block if mark == OPEN else self._read_functions, mark)

    def _read_block(self) -> Wait[bool]:
        yield from self.read_run()
        if (yield from self.take_literal(FUNCTION)):
            return (yield from self._read_functions())
        found = yield from self.read_call_objects()
        if found:
            yield from self.take_literal(CLOSE)
        return found

    def _read_functions(self) -> Wait[bool]:
        """Reads one function, whose opening has been read, and those that follow it."""
        found = False
        while True:
            name = yield from self.read_word()
            if not self.is_accepted_name(name) or not (yield from self.take_literal(">")):
                if found:
                    self.at = self.held or 0
                return found
            found = True
            self.start_call(name)
            yield from self._read_parameters(self.tools.get(name, {}))
            self.end_call()
            yield from self.read_run()
            if (yield from self.take_literal(CLOSE)):
                return True
            self.held = self.at
            if not (yield from self.take_literal(FUNCTION)):
                return True

    def _read_parameters(self, schema: JsonMapping) -> Wait[None]:
        properties = schema.get("properties")
        before = "{"
        while True:
            yield from self.read_run()
            mark = yield from self.match_literal(*NEXT)
            if mark != PARAMETER:
                if mark:
                    self.add_arguments("{}" if before == "{" else "}")
                yield from self.take_literal(END_FUNCTION)
                return
            self.held = self.at
            self.at += len(mark)
            key = yield from self._read_while(_KEY)
            if not (yield from self.take_literal(">")):
                if self.at < len(self.text):
                    self.at = self.held
                else:
                    self.add_arguments(before + json.dumps(key, ensure_ascii=False)[:-1])
                return
            self.held = None
            self.add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if isinstance(properties, Mapping) and key in properties:
                types = find_types(properties[key], schema)
            else:
                types = find_types(schema.get("additionalProperties"), schema) or {"string"}
            if not (yield from self._read_parameter(types)):
                return

    def _read_parameter(self, types: set[str]) -> Wait[bool]:
        """Reads and sends a value; False if the text ends before it."""
        streamed = types == {"string"}
        pieces: list[str] = []
        if streamed:
            self.add_arguments('"')
        yield from self.take_literal("\n")
        while True:
            text, mark = yield from self.read_until("\n" + END_PARAMETER, END_PARAMETER)
            if mark:
                self.held = self.at
                self.at += len(mark)
                yield from self.read_run()
                closed = bool((yield from self.match_literal(*NEXT))) or not (yield from self.peek())
                if not closed:
                    self.at = self.held + len(mark)
                    text += mark
                self.held = None
            else:
                closed = False
            if streamed:
                self.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                pieces.append(text)
            if closed:
                self.add_arguments('"' if streamed else convert_literal("".join(pieces), types))
                return True
            if not mark and self.ended and self.at == len(self.text):
                self.add_arguments("".join(pieces))
                return False


def convert_literal(text: str, types: set[str]) -> str:
    """Converts a parameter to JSON text: unchanged if it is JSON of one of ``types``, else a string."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    wanted = tuple(t for name in types for t in _TYPES.get(name, ())) if types else (dict, list)
    try:
        value = json.loads(bare, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = text
    fits = bool in wanted if isinstance(value, bool) else isinstance(value, wanted)
    return bare if fits else json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> Json:
    raise ValueError(name)
