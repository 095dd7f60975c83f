"""Parsers of Gemma-4's form: ``<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>``, and thoughts in a channel.

Strings stand between ``<|"|>``, which is one token; names of arguments stand without quotes, at every depth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping
from trencadis.server.grammars.lark_grammar_and_tool_functions import (
    ANY,
    GrammarWriter,
    ToolFunction,
    ToolParameter,
    make_separated_rule,
    quoted,
)
from trencadis.server.grammars.regex_translation import escaped
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools.qwen3_tool_parser import find_types, list_text_regexes
from trencadis.server.tools.reasoning_parser import ReasoningFormat, ReasoningParser
from trencadis.server.tools.tool_parser import ToolParser

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
SEPARATORS = ", \t\r\n"
DEPTH = 6
"""Most levels of objects, lists and references in a schema for which a grammar is written."""
_WORDS = {"None": "null", "none": "null", "nil": "null", "NULL": "null"}
_CONSTANT = frozenset({"type", "enum", "const", "$defs"})
_TEXT = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "$defs"})
_LIST = frozenset({"type", "items", "minItems", "maxItems", "$defs"})
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties", "$defs"})
MOST_ITEMS = 64
"""Largest ``minItems`` or ``maxItems`` for which a grammar is written."""


def convert_bare(raw: str) -> str:
    """Converts a value without quotes to JSON text: numbers, true, false and null; anything else is a string."""
    text = raw.strip()
    text = _WORDS.get(text, text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        return text if not isinstance(value, (dict, list)) else json.dumps(raw.strip(), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(raw.strip(), ensure_ascii=False)


def _refuse_constant(name: str) -> Json:
    raise ValueError(name)


def _has_type(value: Json, schema: JsonMapping) -> bool:
    """Returns True if ``type`` of a schema, if there is one, allows a constant."""
    found = find_types({"const": value})
    return (
        "type" not in schema
        or bool(found & find_types(schema))
        or (found == {"integer"} and "number" in find_types(schema))
    )


class Gemma4ToolParser(ToolParser):
    """Reads calls and sends their arguments as JSON, while they are written."""

    tags = (OPEN, CLOSE, QUOTE)
    mark = OPEN
    call_separator = ""

    @classmethod
    def call_rule(cls, writer: GrammarWriter, function: ToolFunction) -> str:
        """Writes name and arguments in the order of the schema, and the closing mark."""
        inner = ValueRules(writer).write_members(function.list_parameters())
        head = writer.write_text(f"{CALL}{function.name}{{")
        return writer.add_rule(f"{head} {inner} {writer.write_text('}' + CLOSE)}")

    def parse(self) -> Wait[None]:
        """Reads content, with calls between marks."""
        while True:
            mark = yield from self.read_content_until(OPEN)
            if not mark:
                return
            yield from self.try_calls(self._read_call, mark)

    def _read_call(self) -> Wait[bool]:
        yield from self.read_run()
        if not (yield from self.take_literal(CALL)):
            return False
        name = yield from self.read_word()
        yield from self.read_run()
        if not self.is_accepted_name(name) or not (yield from self.take_literal("{")):
            return False
        self.start_call(name)
        yield from self._read_arguments()
        yield from self.read_run()
        yield from self.take_literal(CLOSE)
        return True

    def _read_arguments(self) -> Wait[None]:
        """Reads up to the brace that closes the arguments, to ``CLOSE`` or to the end of the text, and sends JSON."""
        closers, lead = ["}"], ""
        self.add_arguments("{")
        while closers:
            yield from self.read_run(SEPARATORS)
            head = yield from self.peek()
            if not head or (head == "<" and (yield from self.match_literal(CLOSE))):
                return
            if head in "}]":
                self.at += 1
                self.add_arguments(closers.pop())
                lead = ", "
                continue
            if closers[-1] == "}":
                key, whole = yield from self._read_key()
                shown = json.dumps(key, ensure_ascii=False)
                if not whole:
                    self.add_arguments(lead + shown[:-1])
                    return
                lead += f"{shown}: "
                yield from self.read_run()
                head = yield from self.peek()
            if head in ("{", "["):
                self.at += 1
                self.add_arguments(lead + head)
                closers.append("}" if head == "{" else "]")
                lead = ""
                continue
            self.add_arguments(lead)
            if not (yield from self._read_value()):
                return
            lead = ", "

    def _read_key(self) -> Wait[tuple[str, bool]]:
        """Reads a name and the colon after it; also returns False if the call ends before the colon."""
        pieces: list[str] = []
        quotes = yield from self.take_literal(QUOTE)
        while True:
            text, mark = yield from self.read_until(*((QUOTE,) if quotes else (":", CLOSE)))
            pieces.append(text)
            if mark == QUOTE:
                self.at += len(mark)
                yield from self.read_run()
                return "".join(pieces), bool((yield from self.take_literal(":")))
            if mark == ":":
                self.at += 1
                return "".join(pieces).strip(), True
            if mark or (self.ended and self.at == len(self.text)):
                return "".join(pieces), False

    def _read_value(self) -> Wait[bool]:
        """Reads and sends a string, or a value without quotes; False if the text ends within it."""
        quotes = yield from self.take_literal(QUOTE)
        if quotes:
            self.add_arguments('"')
        pieces: list[str] = []
        while True:
            text, mark = yield from self.read_until(*((QUOTE,) if quotes else (",", "}", "]", CLOSE)))
            if quotes:
                self.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                pieces.append(text)
            if mark:
                self.at += len(mark) if quotes else 0
                self.add_arguments('"' if quotes else convert_bare("".join(pieces)))
                return True
            if self.ended and self.at == len(self.text):
                self.add_arguments("".join(pieces).strip())
                return False


class ValueRules:
    """Writes the grammar of values in Gemma-4's form."""

    def __init__(self, writer: GrammarWriter) -> None:
        self._writer = writer
        self._referenced: dict[str, str] = {}

    def write_members(self, members: Sequence[ToolParameter], depth: int = DEPTH) -> str:
        """Writes the rule of an object's members: names, colons and values between commas."""
        items = []
        for one in members:
            if not one.name or set(one.name) & set(':,{}[]<>"') or one.name.strip() != one.name:
                raise BadRequest(f"{one.where}: such a name has no place in this form of calls.", param=one.where)
            value = self.write_value(one, depth)
            items.append((self._writer.add_rule(f"{self._writer.write_text(one.name + ':')} {value}"), one.required))
        return make_separated_rule(self._writer, items, quoted(","))

    def write_value(self, one: ToolParameter, depth: int = DEPTH) -> str:
        """Writes the rule of a value that fits a normalised schema.

        Raises:
            BadRequest: the schema has a part that this form has no grammar for.
        """
        schema = one.schema
        if not isinstance(schema, Mapping):
            raise self._no_rule(one, "a type")
        if not depth:
            raise self._no_rule(one, f"at most {DEPTH} levels of objects, lists and references")
        root = schema.get("$defs", {})
        if isinstance(schema.get("$ref"), str):
            self._check_keys(one, schema, frozenset({"$ref", "$defs"}))
            name = schema["$ref"]
            if name not in self._referenced:
                found = root.get(name.removeprefix("#/$defs/"))
                self._referenced[name] = self.write_value(self._with_definitions(one, found, root), depth - 1)
            return self._referenced[name]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                self._check_keys(one, schema, frozenset({key, "$defs"}))
                some = [self.write_value(self._with_definitions(one, each, root), depth - 1) for each in schema[key]]
                return self._writer.add_rule(" | ".join(some))
        if "enum" in schema or "const" in schema:
            self._check_keys(one, schema, _CONSTANT)
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            values = [each for each in values if _has_type(each, schema)]
            if not values:
                raise self._no_rule(one, "constants of the schema's type")
            return self._writer.add_rule(" | ".join(self._write_constant(one, each) for each in values))
        kinds = schema.get("type")
        if isinstance(kinds, list):
            each = [{**schema, "type": kind} for kind in dict.fromkeys(kinds)]  # repeated names would multiply by level
            some = [self.write_value(self._with_definitions(one, alone, root), depth) for alone in each]
            return self._writer.add_rule(" | ".join(some))
        writers = {"string": self._write_text, "array": self._write_list, "object": self._write_object}
        if kinds in ("integer", "number", "boolean", "null"):
            return self._writer.add_json(dict(schema))
        if not isinstance(kinds, str) or kinds not in writers:
            raise self._no_rule(one, "a type")
        return writers[kinds](one, schema, depth)

    def _with_definitions(self, one: ToolParameter, schema: Json, defs: JsonMapping) -> ToolParameter:
        whole = {**schema, "$defs": defs} if isinstance(schema, Mapping) and defs else schema
        return ToolParameter("", whole, True, one.where)

    def _no_rule(self, one: ToolParameter, what: str) -> BadRequest:
        return BadRequest(f"{one.where}: in this form of calls a grammar takes {what}.", param=one.where)

    def _check_keys(self, one: ToolParameter, schema: JsonMapping, known: frozenset[str]) -> None:
        others = sorted(set(schema) - known)
        if others:
            raise BadRequest(f"{one.where}.{others[0]} has no grammar in this form of calls.", param=one.where)

    def _write_constant(self, one: ToolParameter, value: Json) -> str:
        if isinstance(value, str):
            if QUOTE in value:
                raise self._no_rule(one, f"constants without {QUOTE}")
            quote = self._writer.write_text(QUOTE)
            return f"{quote} {quoted(value)} {quote}"
        if isinstance(value, (list, dict)):
            raise self._no_rule(one, "texts, numbers, true, false and null as constants")
        return self._writer.write_text(json.dumps(value))

    def _write_text(self, one: ToolParameter, schema: JsonMapping, depth: int) -> str:
        """Writes a text between quotes, which does not contain them."""
        self._check_keys(one, schema, _TEXT)
        parts = [f"~/{ANY}{escaped(QUOTE)}{ANY}/", f"/{ANY}/"]
        parts += list_text_regexes(schema, one.where)
        text, quote = self._writer.add_terminal(" & ".join(parts)), self._writer.write_text(QUOTE)
        if self._writer.is_token(QUOTE):
            return self._writer.add_rule(f"{quote} {text} {quote}")
        rest = self._writer.add_rule(f"{text} {quote}", "lazy")
        return self._writer.add_rule(f"{quote} {rest}")

    def _write_list(self, one: ToolParameter, schema: JsonMapping, depth: int) -> str:
        self._check_keys(one, schema, _LIST)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if max(least, most or 0) > MOST_ITEMS or (most is not None and most < least):
            raise self._no_rule(one, f"lists whose bounds agree and are at most {MOST_ITEMS}")
        item = self.write_value(self._with_definitions(one, schema.get("items"), schema.get("$defs", {})), depth - 1)
        more = "*" if most is None else f"{{{max(least - 1, 0)},{max(most - 1, 0)}}}"
        if most is None and least > 1:
            more = f"{{{least - 1},}}"
        some = f"{item} ({quoted(',')} {item}){more}"
        if most == 0:
            return self._writer.add_rule(quoted("[]"))
        inner = some if least else f"({some})?"
        return self._writer.add_rule(f"{quoted('[')} {inner} {quoted(']')}")

    def _write_object(self, one: ToolParameter, schema: JsonMapping, depth: int) -> str:
        self._check_keys(one, schema, _OBJECT)
        required, defs = schema.get("required", ()), schema.get("$defs", {})
        others = schema.get("additionalProperties", True)
        named = schema.get("properties", {})
        if others not in (True, False, {}) or not set(required) <= set(named) or not (named or others is False):
            raise self._no_rule(one, "objects that name their properties")
        members = [
            ToolParameter(
                name, self._with_definitions(one, inner, defs).schema, name in required, f"{one.where}.{name}"[:120]
            )
            for name, inner in named.items()
        ]
        return self._writer.add_rule(f"{quoted('{')} {self.write_members(members, depth - 1)} {quoted('}')}")


CHANNEL, END_CHANNEL, LABEL = "<|channel>", "<channel|>", "thought\n"


class Gemma4ReasoningParser(ReasoningParser):
    """Splits off the reasoning; the channel's label is no part of it."""

    def _read_thoughts(self) -> Wait[None]:
        yield from self.take_literal(LABEL)
        yield from super()._read_thoughts()


class Gemma4ReasoningFormat(ReasoningFormat):
    """A channel of its own around the reasoning, whose label follows the opening mark."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The marks, without the label."""
        return CHANNEL, END_CHANNEL

    def make_parser(self, tokenizer: Tokenizer, prompt: Sequence[int], continued: bool = False) -> ReasoningParser:
        """Makes the parser of an answer to ``prompt``."""
        return Gemma4ReasoningParser(CHANNEL, END_CHANNEL, *self.find_state(tokenizer, prompt, continued))


GEMMA4 = Gemma4ReasoningFormat(CHANNEL + LABEL, END_CHANNEL)
