"""Parsers of tool calls that are JSON: those of Hermes and Qwen2.5, of Llama 3, and of Mistral.

* Hermes and Qwen2.5: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
* Llama 3: ``{"name": ..., "parameters": {...}}``, bare or after ``<|python_tag|>``.
* Mistral, after ``[TOOL_CALLS]``: a JSON list, or the name and then its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from trencadis.server.grammars.lark_grammar_and_tool_functions import (
    GrammarWriter,
    ToolFunction,
    make_list_rule,
    quoted,
)
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools.tool_parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser(ToolParser):
    """Reads calls between tags, one each; also a list, or several calls in one pair of tags."""

    tags = (OPEN, CLOSE)
    stop_marks = (CLOSE, OPEN)
    mark = OPEN

    @classmethod
    def call_rule(cls, writer: GrammarWriter, function: ToolFunction) -> str:
        """Writes a JSON object between line breaks, the form in which templates show it."""
        head = writer.write_text(f'\n{{"name": {json.dumps(function.name)}, "arguments": ')
        tail = writer.write_text("}\n" + CLOSE)
        return writer.add_rule(f"{head} {writer.add_json(function.schema)} {tail}")

    def parse(self) -> Wait[None]:
        """Reads content, with calls between tags."""
        while True:
            mark = yield from self.read_content_until(OPEN)
            if not mark:
                return
            yield from self.try_calls(self._read_block, mark)

    def _read_block(self) -> Wait[bool]:
        found = yield from self.read_call_objects()
        if found:
            yield from self.take_literal(CLOSE)
        return found


TAG = "<|python_tag|>"
PLAIN = r"/(\s*[^\s{\[][^\n]*(\n([^{\[\n][^\n]*)?)*)?/"


class Llama3ToolParser(ToolParser):
    """Reads calls that begin a line or follow the tag, and name a function of the request: an answer may be JSON as
    well.
    """

    tags = (TAG,)
    checks_names = True
    call_separator = quoted("; ")

    @classmethod
    def call_rule(cls, writer: GrammarWriter, function: ToolFunction) -> str:
        """Writes a JSON object."""
        head = writer.write_text(f'{{"name": {json.dumps(function.name)}, "parameters": ')
        return writer.add_rule(f"{head} {writer.add_json(function.schema)} {quoted('}')}")

    @classmethod
    def free_text_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes calls, or text in which no line begins like a call."""
        return writer.add_rule(f"{cls.calls_rule(writer, functions, many)} | {writer.add_rule(PLAIN)}")

    def parse(self) -> Wait[None]:
        """Reads content, with calls at the beginning of lines."""
        self.add_content((yield from self.read_run()))
        head = yield from self.take_literal("{", "[")
        if head:
            yield from self.try_calls(self.read_call_objects, head, 1)
        while True:
            mark = yield from self.read_content_until(TAG, "\n{", "\n[")
            if not mark:
                return
            if mark == TAG:
                yield from self.try_calls(self.read_call_objects, mark)
            else:
                self.add_content("\n")
                yield from self.try_calls(self.read_call_objects, mark[1:], 1)


CALLS_TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralToolParser(ToolParser):
    """Reads ``[TOOL_CALLS][{"name": ..., "arguments": ...}]``, or ``[TOOL_CALLS]name{...}`` once for each call."""

    tags = (CALLS_TAG, ID, ARGS)
    stop_marks = (CALLS_TAG,)
    id_length = 9
    mark = CALLS_TAG
    call_separator = ""

    @classmethod
    def call_rule(cls, writer: GrammarWriter, function: ToolFunction) -> str:
        """Writes the name and then its arguments if the model has a token between them, else an item of a list."""
        if writer.is_token(ARGS):
            return writer.add_rule(f"{writer.write_text(function.name + ARGS)} {writer.add_json(function.schema)}")
        head = writer.write_text(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        return writer.add_rule(f"{head} {writer.add_json(function.schema)} {quoted('}')}")

    @classmethod
    def calls_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes each call after a mark, or one list."""
        if writer.is_token(ARGS):
            return super().calls_rule(writer, functions, many)
        return writer.add_rule(f"{writer.write_text(CALLS_TAG)} {cls._list_rule(writer, functions, many)}")

    @classmethod
    def free_text_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes text, and calls at its end."""
        if writer.is_token(ARGS):
            return super().free_text_rule(writer, functions, many)
        calls = f"{writer.write_until(CALLS_TAG)} {cls._list_rule(writer, functions, many)}"
        return writer.add_rule(f"{calls} | {writer.write_free_text(CALLS_TAG)}")

    @classmethod
    def _list_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        return make_list_rule(writer, [cls.call_rule(writer, one) for one in functions], many)

    def parse(self) -> Wait[None]:
        """Reads content, with calls after tags."""
        while True:
            mark = yield from self.read_content_until(CALLS_TAG)
            if not mark:
                return
            yield from self.try_calls(self._read_calls, mark)

    def _read_calls(self) -> Wait[bool]:
        yield from self.read_run()
        if (yield from self.peek()) in ("[", "{"):
            return (yield from self.read_call_objects())
        name = yield from self.read_word()
        id = ""
        if (yield from self.take_literal(ID)):
            id = yield from self.read_word()
        yield from self.take_literal(ARGS)
        yield from self.read_run()
        if not self.is_accepted_name(name) or (yield from self.peek()) != "{":
            return False
        self.start_call(name, id)
        yield from self.read_value(self.add_arguments)
        return True
