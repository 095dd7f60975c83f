"""/v1/messages and /v1/messages/count_tokens: requests, answers, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.protocol.base_request import (
    FieldContext,
    Int,
    Object,
    Objects,
    Strict,
    Text,
    Texts,
    TranslatedRequest,
)
from trencadis.server.protocol.chat_completions import ChatRequest

THINKING = ("enabled", "disabled", "adaptive", "between_tools")
BUDGET = "thinking_token_budget"
"""The field of a chat request for ``thinking.budget_tokens``."""
CHOICES = ("auto", "any", "tool", "none")


class CountTokensRequest(TranslatedRequest):
    """A conversation. ``server.dialects`` checks its blocks and names the place of an error."""

    bulky: ClassVar[tuple[str, ...]] = (*TranslatedRequest.bulky, "messages", "system", "tools")

    messages: list[Json]
    system: Text | list[Json] | None = None
    tools: Objects | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    output_format: Object | None = None
    cache_control: Object | None = None

    def check(self) -> None:
        """See GenerateRequest; adds what only messages have."""
        super().check()
        kind = (self.thinking or {}).get("type", "adaptive")
        if kind not in THINKING:
            raise BadRequest(f"thinking.type must be one of {', '.join(THINKING)}.", param="thinking.type")
        budget = (self.thinking or {}).get("budget_tokens")
        if budget is not None and (type(budget) is not int or budget < 1):
            raise BadRequest("thinking.budget_tokens must be a positive integer.", param="thinking.budget_tokens")
        kind = (self.tool_choice or {}).get("type", "auto")
        if kind not in CHOICES:
            raise BadRequest(f"tool_choice.type must be one of {', '.join(CHOICES)}.", param="tool_choice.type")
        for name in ("output_config", "output_format"):
            if not isinstance((getattr(self, name) or {}).get("format", {}), dict | None):
                raise BadRequest(f"{name}.format must be an object.", param=f"{name}.format")

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body."""
        yield from super().list_unused_fields(context)
        for name in ("metadata", "service_tier"):
            if getattr(self, name, None):
                yield name
        if (self.thinking or {}).get("budget_tokens") and not (
            context.reasoning and BUDGET in ChatRequest.model_fields
        ):
            yield "thinking.budget_tokens"


class MessagesRequest(CountTokensRequest):
    """A conversation to continue."""

    max_tokens: Int
    stop_sequences: Texts | None = None
    metadata: Object | None = None
    service_tier: Text | None = None


class TokenCount(Strict):
    """Tokens of a prompt, with its images."""

    input_tokens: int


class TextBlock(Strict):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingBlock(Strict):
    """Reasoning. The signature is a digest of it; nothing checks it when it comes back."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(Strict):
    """A call."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: JsonObject


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class ThinkingTokens(Strict):
    """Kinds of an answer's tokens."""

    thinking_tokens: int


class MessagesUsage(Strict):
    """Tokens of a request; ``input_tokens`` are those that were not read from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: ThinkingTokens | None = Field(default=None, exclude_if=lambda v: v is None)


class MessagesResponse(Strict):
    """The whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock] = Field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class MessagesErrorInfo(Strict):
    """The inside of Anthropic's error envelope."""

    type: str
    message: str


class MessagesError(Strict):
    """The error envelope that Anthropic's clients parse."""

    type: Literal["error"] = "error"
    error: MessagesErrorInfo
    request_id: str | None = None
