"""Calls as Llama 3 writes them: ``{"name": ..., "parameters": {...}}``, bare or after ``<|python_tag|>``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trencadis.server.grammars.functions import Function
from trencadis.server.grammars.writer import GrammarWriter, quoted
from trencadis.server.text.incremental import Wait
from trencadis.server.tools.parser import ToolParser

TAG = "<|python_tag|>"
PLAIN = r"/(\s*[^\s{\[][^\n]*(\n([^{\[\n][^\n]*)?)*)?/"


class Llama3Parser(ToolParser):
    """A call begins a line or follows the tag, and names a function of the request: an answer may be JSON as well."""

    tags = (TAG,)
    checks_names = True
    joint = quoted("; ")

    @classmethod
    def call(cls, writer: GrammarWriter, function: Function) -> str:
        """A JSON object."""
        head = writer.text(f'{{"name": {json.dumps(function.name)}, "parameters": ')
        return writer.rule(f"{head} {writer.json(function.schema)} {quoted('}')}")

    @classmethod
    def amid(cls, writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
        """Calls, or text in which no line begins like one."""
        return writer.rule(f"{cls.calls(writer, functions, many)} | {writer.rule(PLAIN)}")

    def grammar(self) -> Wait[None]:
        """Content, with calls at the beginning of lines."""
        self.say((yield from self.run_of()))
        head = yield from self.takes("{", "[")
        if head:
            yield from self.attempt(self.call_objects, head, 1)
        while True:
            mark = yield from self.content_until(TAG, "\n{", "\n[")
            if not mark:
                return
            if mark == TAG:
                yield from self.attempt(self.call_objects, mark)
            else:
                self.say("\n")
                yield from self.attempt(self.call_objects, mark[1:], 1)
