"""Calls as Hermes and Qwen2.5 write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import json

from trencadis.server.grammars.functions import Function
from trencadis.server.grammars.writer import GrammarWriter
from trencadis.server.text.incremental import Wait
from trencadis.server.tools.parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Each call in tags of its own. A list, or several calls in one pair of tags, are read too."""

    tags = (OPEN, CLOSE)
    walls = (CLOSE, OPEN)
    mark = OPEN

    @classmethod
    def call(cls, writer: GrammarWriter, function: Function) -> str:
        """A JSON object between line breaks, as templates show it."""
        head = writer.text(f'\n{{"name": {json.dumps(function.name)}, "arguments": ')
        tail = writer.text("}\n" + CLOSE)
        return writer.rule(f"{head} {writer.json(function.schema)} {tail}")

    def grammar(self) -> Wait[None]:
        """Content, with calls between tags."""
        while True:
            mark = yield from self.content_until(OPEN)
            if not mark:
                return
            yield from self.attempt(self._block, mark)

    def _block(self) -> Wait[bool]:
        found = yield from self.call_objects()
        if found:
            yield from self.takes(CLOSE)
        return found
