"""Calls as Qwen3-Coder and Qwen3.5 write them: ``<function=f>``, then ``<parameter=key>`` and a text for each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trencadis.server.grammars.functions import Function
from trencadis.server.grammars.writer import GrammarWriter, quoted
from trencadis.server.text.incremental import Wait
from trencadis.server.tools.hermes import CLOSE, OPEN
from trencadis.server.tools.parser import ToolParser
from trencadis.server.tools.qwen3_values import types_of, value

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NEXT = (PARAMETER, END_FUNCTION, CLOSE)
"""What may follow a value."""
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


class Qwen3Parser(ToolParser):
    """The schema of a parameter says whether its text is a string or JSON; text that is no such JSON is a string."""

    tags = (OPEN, CLOSE)
    walls = (CLOSE, OPEN)
    mark = OPEN

    @classmethod
    def call(cls, writer: GrammarWriter, function: Function) -> str:
        """Each parameter between lines of its own, as templates show it."""
        items = []
        for one in function.parameters():
            item = f"{writer.text(f'{PARAMETER}{one.name}>' + chr(10))} {value(writer, one)} {quoted(chr(10))}"
            items.append(writer.rule(item) + ("" if one.required else "?"))
        head = writer.text(f"\n{FUNCTION}{function.name}>\n")
        return writer.rule(f"{head} {' '.join(items)} {writer.text(END_FUNCTION + chr(10) + CLOSE)}")

    def grammar(self) -> Wait[None]:
        """Content, with calls between tags; some models leave out the outer ones."""
        while True:
            mark = yield from self.content_until(OPEN, FUNCTION)
            if not mark:
                return
            yield from self.attempt(self._block if mark == OPEN else self._functions, mark)

    def _block(self) -> Wait[bool]:
        yield from self.run_of()
        if (yield from self.takes(FUNCTION)):
            return (yield from self._functions())
        found = yield from self.call_objects()
        if found:
            yield from self.takes(CLOSE)
        return found

    def _functions(self) -> Wait[bool]:
        """One function, whose opening has been read, and those that follow it."""
        found = False
        while True:
            name = yield from self.word()
            if not self.accepts(name) or not (yield from self.takes(">")):
                if found:
                    self.at = self.held or 0
                return found
            found = True
            self.start(name)
            yield from self._parameters(self.tools.get(name, {}))
            self.end()
            yield from self.run_of()
            if (yield from self.takes(CLOSE)):
                return True
            self.held = self.at
            if not (yield from self.takes(FUNCTION)):
                return True

    def _parameters(self, schema: Mapping[str, Any]) -> Wait[None]:
        properties = schema.get("properties")
        before = "{"
        while True:
            yield from self.run_of()
            mark = yield from self.sees(*NEXT)
            if mark != PARAMETER:
                if mark:
                    self.argue("{}" if before == "{" else "}")
                yield from self.takes(END_FUNCTION)
                return
            self.held = self.at
            self.at += len(mark)
            key = yield from self._while(_KEY)
            if not (yield from self.takes(">")):
                if self.at < len(self.text):
                    self.at = self.held
                else:
                    self.argue(before + json.dumps(key, ensure_ascii=False)[:-1])
                return
            self.held = None
            self.argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            known = isinstance(properties, Mapping) and key in properties
            types = types_of(properties[key], schema) if known and isinstance(properties, Mapping) else {"string"}
            if not (yield from self._parameter(types)):
                return

    def _parameter(self, types: set[str]) -> Wait[bool]:
        """Reads and sends a value; False if the text ends before it."""
        streamed = types == {"string"}
        pieces: list[str] = []
        if streamed:
            self.argue('"')
        yield from self.takes("\n")
        while True:
            text, mark = yield from self.until("\n" + END_PARAMETER, END_PARAMETER)
            if mark:
                self.held = self.at
                self.at += len(mark)
                yield from self.run_of()
                closed = bool((yield from self.sees(*NEXT))) or not (yield from self.ahead())
                if not closed:
                    self.at = self.held + len(mark)
                    text += mark
                self.held = None
            else:
                closed = False
            if streamed:
                self.argue(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                pieces.append(text)
            if closed:
                self.argue('"' if streamed else literal("".join(pieces), types))
                return True
            if not mark and self.ended and self.at == len(self.text):
                self.argue("".join(pieces))
                return False


def literal(text: str, types: set[str]) -> str:
    """The JSON text of a parameter: as written if it is JSON of one of ``types``, else a string."""
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
