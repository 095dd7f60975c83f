"""/v1/chat/completions/batch: several conversations in one request, all with the same parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from trencadis.core.errors import BadRequest
from trencadis.server.protocol.base_request import FieldContext
from trencadis.server.protocol.chat_completions import ChatRequest

MOST_MESSAGES = 8192
"""Most messages of a conversation."""


class BatchChatRequest(ChatRequest):
    """``messages`` is a list of conversations; each is answered once."""

    plain: ClassVar[frozenset[str]] = frozenset()
    messages: list[list[Any]] = Field(min_length=1)

    def check(self) -> None:
        """See ChatRequest; also refuses fields that cannot apply to one answer for several conversations."""
        super().check()
        for name in ("stream", "tools", "use_beam_search"):
            if getattr(self, name):
                raise BadRequest(f"{name} is not available for several conversations.", param=name)
        if self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs are not available for several conversations.", param="prompt_logprobs")
        if self.n not in (None, 1):
            raise BadRequest(f"n must be 1 for several conversations, got {self.n}.", param="n")
        long = next((i for i, conversation in enumerate(self.messages) if len(conversation) > MOST_MESSAGES), None)
        if long is not None:
            raise BadRequest(f"A conversation has at most {MOST_MESSAGES} messages.", param=f"messages[{long}]")

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body. An echo depends on each conversation, so it is not reported."""
        yield from (name for name in super().list_unused_fields(context) if name != "echo")

    def split(self) -> list[ChatRequest]:
        """Makes one request for each conversation."""
        return [self.model_copy(update={"messages": conversation}) for conversation in self.messages]
