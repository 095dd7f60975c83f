"""Parser of the calls of Qwen3-Coder and Qwen3.5: ``<function=f>``, then ``<parameter=key>`` and a text for each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trencadis.server.grammars.grammar_writer import GrammarWriter, quoted
from trencadis.server.grammars.tool_functions import ToolFunction
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools.hermes_tool_parser import CLOSE, OPEN
from trencadis.server.tools.qwen3_parameters import find_types, write_value_rule
from trencadis.server.tools.tool_parser import ToolParser

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
            head = writer.write_text(f"{PARAMETER}{one.name}>\n")
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

    def _read_parameters(self, schema: Mapping[str, Any]) -> Wait[None]:
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
            known = isinstance(properties, Mapping) and key in properties
            types = find_types(properties[key], schema) if known and isinstance(properties, Mapping) else {"string"}
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


def _no_constant(name: str) -> Any:
    raise ValueError(name)
