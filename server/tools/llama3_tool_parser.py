"""Parser of the calls of Llama 3: ``{"name": ..., "parameters": {...}}``, bare or after ``<|python_tag|>``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trencadis.server.grammars.grammar_writer import GrammarWriter, quoted
from trencadis.server.grammars.tool_functions import ToolFunction
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools.tool_parser import ToolParser

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
