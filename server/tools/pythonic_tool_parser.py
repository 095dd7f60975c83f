"""Parsers of calls in Python, ``[f(a=1, b="x"), g()]``: those of Llama 4 and others, and LFM2's between tags."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence

from trencadis.core.errors import BadRequest
from trencadis.server.grammars.lark_grammar_and_tool_functions import (
    GrammarWriter,
    ToolFunction,
    make_list_rule,
    make_separated_rule,
    quoted,
)
from trencadis.server.protocol.tool_definitions import NAME
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools.tool_parser import ToolParser

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
PLAIN = r"/(\s*[^\s\[](?s:.*))?/"
MAX_VALUE = 1 << 16
"""Most characters of a value that is no string; a longer one is sent as a string."""
_PLAIN = re.compile(r"[^\"'()\[\]{},]++")
_INSIDE = {q: re.compile(rf"[^{q}\\]*+(?:\\.[^{q}\\]*+)*+", re.DOTALL) for q in "\"'"}


class PythonicToolParser(ToolParser):
    """Reads a list at the beginning of an answer, or after a tag, that names functions of the request."""

    tags = (OPEN, CLOSE)
    checks_names = True

    @classmethod
    def call_rule(cls, writer: GrammarWriter, function: ToolFunction) -> str:
        """Writes keyword arguments, each in JSON."""
        items = []
        for one in function.list_parameters():
            if not NAME.fullmatch(one.name):
                raise BadRequest(f"{one.where}: such a name has no place in Python.", param=one.where)
            items.append(
                (writer.add_rule(f"{writer.write_text(one.name + '=')} {writer.add_json(one.schema)}"), one.required)
            )
        inner = make_separated_rule(writer, items, quoted(", "))
        return writer.add_rule(f"{writer.write_text(function.name + '(')} {inner} {quoted(')')}")

    @classmethod
    def calls_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes a list of calls."""
        return make_list_rule(writer, [cls.call_rule(writer, one) for one in functions], many)

    @classmethod
    def free_text_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes calls, or text that does not begin like a list."""
        return writer.add_rule(f"{cls.calls_rule(writer, functions, many)} | {writer.add_rule(PLAIN)}")

    def parse(self) -> Wait[None]:
        """Reads [calls] content, with calls after tags."""
        self.add_content((yield from self.read_run()))
        head = yield from self.take_literal("[")
        if head:
            yield from self.try_calls(self._read_calls, head, 1)
        while True:
            mark = yield from self.read_content_until(self.tags[0])
            if not mark:
                return
            yield from self.try_calls(self._read_calls, mark)

    def _read_calls(self) -> Wait[bool]:
        yield from self.read_run()
        if not (yield from self.take_literal("[")):
            return False
        found = False
        while True:
            yield from self.read_run()
            name = yield from self.read_word()
            called = (
                self.is_accepted_name(name)
                and bool((yield from self.take_literal("(")))
                and (yield from self._read_call(name))
            )
            if not called:
                if found:
                    self.at = self.held or 0
                return found
            found = True
            yield from self.read_run()
            self.held = self.at
            if not (yield from self.take_literal(",")):
                break
        yield from self.take_literal("]")
        yield from self.read_run()
        yield from self.take_literal(self.tags[1])
        return True

    def _read_call(self, name: str) -> Wait[bool]:
        """Reads the arguments and the closing bracket; False if this is no call, which its first argument shows."""
        before = "{"
        while True:
            yield from self.read_run()
            if (yield from self.take_literal(")")):
                if before == "{":
                    self.start_call(name)
                self.add_arguments("{}" if before == "{" else "}")
                break
            if before != "{":
                self.held = self.at
            key = yield from self.read_word()
            yield from self.read_run()
            if not key or not (yield from self.take_literal("=")):
                if before == "{":
                    return False
                if self.at < len(self.text):
                    self.at = self.held or 0
                elif key:
                    self.add_arguments(before + json.dumps(key, ensure_ascii=False)[:-1])
                break
            if before == "{":
                self.start_call(name)
            self.held = None
            raw, whole = yield from self._read_literal()
            shown = convert_literal(raw) if whole else raw.lstrip()
            self.add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {shown}")
            before = ", "
            yield from self.take_literal(",")
        self.end_call()
        return True

    def _read_literal(self) -> Wait[tuple[str, bool]]:
        """Reads the text of a value; also returns True if something follows it."""
        out: list[str] = []
        depth = 0
        while True:
            head = yield from self.peek()
            if not head:
                return "".join(out), False
            if head in "\"'":
                out.append((yield from self._read_quoted(head)))
                continue
            if depth == 0 and head in ",)]}":
                return "".join(out), True
            plain = _PLAIN.match(self.text, self.at)
            end = self.at + 1 if plain is None else plain.end()
            out.append(self.text[self.at : end])
            self.at = end
            depth += (head in "([{") - (head in ")]}")

    def _read_quoted(self, quote: str) -> Wait[str]:
        size = 3 if (yield from self.peek(3)) == quote * 3 else 1
        out = quote * size
        self.at += size
        while True:
            match = _INSIDE[quote].match(self.text, self.at)
            assert match is not None
            out += match[0]
            self.at = match.end()
            if self.text.startswith(quote, self.at):
                closes = (yield from self.peek(size)) == quote * size
                out += quote * (size if closes else 1)
                self.at += size if closes else 1
                if closes:
                    return out
            elif not (yield from self.wait()):
                out += self.text[self.at :]
                self.at = len(self.text)
                return out


class Lfm2ToolParser(PythonicToolParser):
    """Reads a list of calls between tags, anywhere in an answer."""

    tags = ("<|tool_call_start|>", "<|tool_call_end|>")
    mark = tags[0]
    checks_names = False

    @classmethod
    def calls_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes a list of calls between the tags."""
        return writer.add_rule(f"{writer.write_text(cls.mark)} {cls._list_rule(writer, functions, many)}")

    @classmethod
    def free_text_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes free text in which the first tag begins a list of calls."""
        calls = cls._list_rule(writer, functions, many)
        return writer.add_rule(f"({writer.write_until(cls.mark)} {calls})? {writer.write_free_text(cls.mark)}")

    @classmethod
    def _list_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes a list of calls and the tag behind it."""
        return f"{super().calls_rule(writer, functions, many)} {writer.write_text(cls.tags[1])}"

    def parse(self) -> Wait[None]:
        """Reads content, with calls after tags."""
        while mark := (yield from self.read_content_until(self.mark)):
            yield from self.try_calls(self._read_calls, mark)


def convert_literal(raw: str) -> str:
    """Converts a Python literal to JSON text; JSON stays unchanged, anything else becomes a string."""
    text = raw.strip()
    try:
        if len(text) > MAX_VALUE and text[:1] not in "\"'":
            raise ValueError("too long")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unknown escapes
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
