"""/v1/chat/completions: request, response and stream chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Literal

from pydantic import Field

from trencadis.core.errors import BadRequest
from trencadis.server.protocol.base import FieldContext, GenerateRequest, Int, Strict, Texts, Usage
from trencadis.server.protocol.fields import Object, Objects, Text

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that requests set by fields of their own."""
MOST_NAMED = 64
"""Most variables that are searched for in the template; a request may have a million."""


def unread(context: FieldContext, kwargs: dict[str, Any] | None, **fields: Any) -> Iterator[str]:
    """Names of the variables in a request that the chat template does not read."""
    yield from (name for name, value in fields.items() if value and not context.mentions(name))
    for name in islice(kwargs or {}, MOST_NAMED):
        if name in RESERVED or not context.mentions(name):
            yield f"chat_template_kwargs.{name}"


class ChatRequest(GenerateRequest):
    """A conversation to continue. ``prompts.chat`` checks the messages and names the place of an error."""

    bulky: ClassVar[tuple[str, ...]] = (
        *GenerateRequest.bulky, "messages", "tools", "documents", "chat_template", "chat_template_kwargs"
    )  # fmt: skip
    messages: list[Any]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = False
    top_logprobs: Int | None = None
    response_format: Object | None = None
    tools: Objects | None = None
    tool_choice: Text | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Text | None = None
    service_tier: Text | None = None
    modalities: Texts | None = None
    echo: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Objects | None = None
    chat_template: Text | None = None
    chat_template_kwargs: Object | None = None

    def check(self) -> None:
        """See GenerateRequest; adds what only chat has."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise BadRequest(
                f"response_format {str(kind)[:40]!r} is not supported yet; only 'text'.", param="response_format"
            )
        if self.tools is not None and not self.tools:
            raise BadRequest("tools must not be empty; leave it out instead.", param="tools")
        if not self.tools and self.tool_choice not in (None, "none"):
            raise BadRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
        if self.tools and self.tool_choice != "none":
            raise BadRequest("tools are not supported yet, except with tool_choice 'none'.", param="tools")
        if any(m != "text" for m in self.modalities or []):
            raise BadRequest("only the modality 'text' is supported.", param="modalities")
        if self.echo:
            raise BadRequest("echo is not supported in chat completions.", param="echo")

    def unused(self, context: FieldContext) -> Iterator[str]:
        """See Body. Tools are accepted only with tool_choice "none", and only the template sees them."""
        yield from super().unused(context)
        for name in ("parallel_tool_calls", "reasoning_effort", "service_tier"):
            if getattr(self, name) is not None:
                yield name
        if self.add_special_tokens:
            yield "add_special_tokens"
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            yield "max_tokens"
        yield from unread(context, self.chat_template_kwargs, tools=self.tools, documents=self.documents)

    @property
    def shows_tokens(self) -> bool:
        """See GenerateRequest."""
        return bool(self.logprobs)

    @property
    def opens_answer(self) -> bool:
        """Whether the template starts the assistant's turn: as asked, else unless the last message continues."""
        return self.add_generation_prompt and (
            "add_generation_prompt" in self.model_fields_set or not self.continue_final_message
        )

    @property
    def limit(self) -> tuple[str, int | None]:
        """The name and value of the requested output limit."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class TopLogprob(Strict):
    """A candidate at one place."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprobs(TopLogprob):
    """The chosen token and the best candidates."""

    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChoiceLogprobs(Strict):
    """Log-probabilities of a choice."""

    content: list[TokenLogprobs] | None = None
    refusal: None = None


class Message(Strict):
    """The assistant's answer."""

    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class Choice(Strict):
    """One of ``n`` answers."""

    index: int
    message: Message
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(Strict):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class DeltaMessage(Strict):
    """What a chunk adds; only set fields are sent."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(Strict):
    """One choice's part of a chunk."""

    index: int
    delta: DeltaMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Strict):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
