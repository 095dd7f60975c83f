"""Calls as Llama 4 and others write them, in Python: ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence

from trencadis.core.errors import BadRequest
from trencadis.server.grammars.functions import Function, listed, separated
from trencadis.server.grammars.writer import GrammarWriter, quoted
from trencadis.server.protocol.tools import NAME
from trencadis.server.text.incremental import Wait
from trencadis.server.tools.parser import ToolParser

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
PLAIN = r"/(\s*[^\s\[](?s:.*))?/"
MAX_VALUE = 1 << 16
"""Most characters of a value that is no string; a longer one is sent as a string."""
_PLAIN = re.compile(r"[^\"'()\[\]{},]++")
_INSIDE = {q: re.compile(rf"[^{q}\\]*+(?:\\.[^{q}\\]*+)*+", re.DOTALL) for q in "\"'"}


class PythonicParser(ToolParser):
    """The list is the beginning of an answer, or follows a tag, and names functions of the request."""

    tags = (OPEN, CLOSE)
    checks_names = True

    @classmethod
    def call(cls, writer: GrammarWriter, function: Function) -> str:
        """Keyword arguments, each in JSON."""
        items = []
        for one in function.parameters():
            if not NAME.fullmatch(one.name):
                raise BadRequest(f"{one.where}: such a name has no place in Python.", param=one.where)
            items.append((writer.rule(f"{writer.text(one.name + '=')} {writer.json(one.schema)}"), one.required))
        inner = separated(writer, items, quoted(", "))
        return writer.rule(f"{writer.text(function.name + '(')} {inner} {quoted(')')}")

    @classmethod
    def calls(cls, writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
        """A list."""
        return listed(writer, [cls.call(writer, one) for one in functions], many)

    @classmethod
    def amid(cls, writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
        """Calls, or text that does not begin like a list."""
        return writer.rule(f"{cls.calls(writer, functions, many)} | {writer.rule(PLAIN)}")

    def grammar(self) -> Wait[None]:
        """[calls] content, with calls after tags."""
        self.say((yield from self.run_of()))
        head = yield from self.takes("[")
        if head:
            yield from self.attempt(self._calls, head, 1)
        while True:
            mark = yield from self.content_until(OPEN)
            if not mark:
                return
            yield from self.attempt(self._calls, mark)

    def _calls(self) -> Wait[bool]:
        yield from self.run_of()
        if not (yield from self.takes("[")):
            return False
        found = False
        while True:
            yield from self.run_of()
            name = yield from self.word()
            called = self.accepts(name) and bool((yield from self.takes("("))) and (yield from self._call(name))
            if not called:
                if found:
                    self.at = self.held or 0
                return found
            found = True
            yield from self.run_of()
            self.held = self.at
            if not (yield from self.takes(",")):
                break
        yield from self.takes("]")
        yield from self.run_of()
        yield from self.takes(CLOSE)
        return True

    def _call(self, name: str) -> Wait[bool]:
        """The arguments and the closing bracket; False if this is no call, which its first argument shows."""
        before = "{"
        while True:
            yield from self.run_of()
            if (yield from self.takes(")")):
                if before == "{":
                    self.start(name)
                self.argue("{}" if before == "{" else "}")
                break
            if before != "{":
                self.held = self.at
            key = yield from self.word()
            yield from self.run_of()
            if not key or not (yield from self.takes("=")):
                if before == "{":
                    return False
                if self.at < len(self.text):
                    self.at = self.held or 0
                elif key:
                    self.argue(before + json.dumps(key, ensure_ascii=False)[:-1])
                break
            if before == "{":
                self.start(name)
            self.held = None
            raw, whole = yield from self._value()
            shown = as_json(raw) if whole else raw.lstrip()
            self.argue(f"{before}{json.dumps(key, ensure_ascii=False)}: {shown}")
            before = ", "
            yield from self.takes(",")
        self.end()
        return True

    def _value(self) -> Wait[tuple[str, bool]]:
        """The text of a value, and whether something follows it."""
        out: list[str] = []
        depth = 0
        while True:
            head = yield from self.ahead()
            if not head:
                return "".join(out), False
            if head in "\"'":
                out.append((yield from self._string(head)))
                continue
            if depth == 0 and head in ",)]}":
                return "".join(out), True
            plain = _PLAIN.match(self.text, self.at)
            end = self.at + 1 if plain is None else plain.end()
            out.append(self.text[self.at : end])
            self.at = end
            depth += (head in "([{") - (head in ")]}")

    def _string(self, quote: str) -> Wait[str]:
        size = 3 if (yield from self.ahead(3)) == quote * 3 else 1
        out = quote * size
        self.at += size
        while True:
            match = _INSIDE[quote].match(self.text, self.at)
            assert match is not None
            out += match[0]
            self.at = match.end()
            if self.text.startswith(quote, self.at):
                closes = (yield from self.ahead(size)) == quote * size
                out += quote * (size if closes else 1)
                self.at += size if closes else 1
                if closes:
                    return out
            elif not (yield from self.wait()):
                out += self.text[self.at :]
                self.at = len(self.text)
                return out


def as_json(raw: str) -> str:
    """The JSON text of a Python literal; of JSON as written; of anything else as a string."""
    text = raw.strip()
    try:
        if len(text) > MAX_VALUE and text[:1] not in "\"'":
            raise ValueError("too long")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes
            value = ast.literal_eval(text)
        made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        made.encode()
        return made
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    try:
        json.loads(text)
        return text
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
