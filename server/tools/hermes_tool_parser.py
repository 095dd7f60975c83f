"""Parser of the calls of Hermes and Qwen2.5: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import json

from trencadis.server.grammars.grammar_writer import GrammarWriter
from trencadis.server.grammars.tool_functions import ToolFunction
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
