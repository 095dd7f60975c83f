"""Parser of the calls of Mistral's models after ``[TOOL_CALLS]``: a JSON list, or the name and then its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trencadis.server.grammars.grammar_writer import GrammarWriter, quoted
from trencadis.server.grammars.tool_functions import ToolFunction, make_list_rule
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools.tool_parser import ToolParser

TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralToolParser(ToolParser):
    """Reads ``[TOOL_CALLS][{"name": ..., "arguments": ...}]``, or ``[TOOL_CALLS]name{...}`` once for each call."""

    tags = (TAG, ID, ARGS)
    stop_marks = (TAG,)
    id_length = 9
    mark = TAG
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
        return writer.add_rule(f"{writer.write_text(TAG)} {cls._list_rule(writer, functions, many)}")

    @classmethod
    def free_text_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        """Writes text, and calls at its end."""
        if writer.is_token(ARGS):
            return super().free_text_rule(writer, functions, many)
        return writer.add_rule(
            f"{writer.write_until(TAG)} {cls._list_rule(writer, functions, many)} | {writer.write_free_text(TAG)}"
        )

    @classmethod
    def _list_rule(cls, writer: GrammarWriter, functions: Sequence[ToolFunction], many: bool) -> str:
        return make_list_rule(writer, [cls.call_rule(writer, one) for one in functions], many)

    def parse(self) -> Wait[None]:
        """Reads content, with calls after tags."""
        while True:
            mark = yield from self.read_content_until(TAG)
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
