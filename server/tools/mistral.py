"""Calls as Mistral's models write them after ``[TOOL_CALLS]``: a JSON list, or the name and then its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trencadis.server.grammars.functions import Function, listed
from trencadis.server.grammars.writer import GrammarWriter, quoted
from trencadis.server.text.incremental import Wait
from trencadis.server.tools.parser import ToolParser

TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}]``, or ``[TOOL_CALLS]name{...}`` once for each call."""

    tags = (TAG, ID, ARGS)
    walls = (TAG,)
    id_length = 9
    mark = TAG
    joint = ""

    @classmethod
    def call(cls, writer: GrammarWriter, function: Function) -> str:
        """The name and then its arguments where the model has a token between them, else an item of a list."""
        if writer.is_token(ARGS):
            return writer.rule(f"{writer.text(function.name + ARGS)} {writer.json(function.schema)}")
        head = writer.text(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        return writer.rule(f"{head} {writer.json(function.schema)} {quoted('}')}")

    @classmethod
    def calls(cls, writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
        """Each call behind a mark, or one list."""
        if writer.is_token(ARGS):
            return super().calls(writer, functions, many)
        return writer.rule(f"{writer.text(TAG)} {cls._list(writer, functions, many)}")

    @classmethod
    def amid(cls, writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
        """Text, and calls at its end."""
        if writer.is_token(ARGS):
            return super().amid(writer, functions, many)
        return writer.rule(f"{writer.until(TAG)} {cls._list(writer, functions, many)} | {writer.free(TAG)}")

    @classmethod
    def _list(cls, writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
        return listed(writer, [cls.call(writer, one) for one in functions], many)

    def grammar(self) -> Wait[None]:
        """Content, with calls after tags."""
        while True:
            mark = yield from self.content_until(TAG)
            if not mark:
                return
            yield from self.attempt(self._calls, mark)

    def _calls(self) -> Wait[bool]:
        yield from self.run_of()
        if (yield from self.ahead()) in ("[", "{"):
            return (yield from self.call_objects())
        name = yield from self.word()
        id = ""
        if (yield from self.takes(ID)):
            id = yield from self.word()
        yield from self.takes(ARGS)
        yield from self.run_of()
        if not self.accepts(name) or (yield from self.ahead()) != "{":
            return False
        self.start(name, id)
        yield from self.value(self.argue)
        return True
