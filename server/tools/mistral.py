"""Calls as Mistral's models write them after ``[TOOL_CALLS]``: a JSON list, or the name and then its arguments."""

from __future__ import annotations

from trencadis.server.text.incremental import Wait
from trencadis.server.tools.parser import ToolParser

TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}]``, or ``[TOOL_CALLS]name{...}`` once for each call."""

    tags = (TAG, ID, ARGS)
    walls = (TAG,)
    id_length = 9

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
