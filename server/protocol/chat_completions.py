"""/v1/chat/completions: request, response and stream chunks.

``prediction`` is a text that the answer may repeat. /v1/chat/completions/batch: several conversations in one request,
all with the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import ClassVar, Literal

from pydantic import Field

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonObject
from trencadis.core.request import REASONING_EFFORTS
from trencadis.server.protocol.base_request import (
    FieldContext,
    GenerateRequest,
    Int,
    Object,
    Objects,
    Strict,
    Text,
    Texts,
    Usage,
)
from trencadis.server.protocol.tool_definitions import check_tools, is_subset, select_allowed_tools

FIELD = "prediction"


def read_prediction(value: JsonObject) -> str:
    """Returns the predicted text.

    Raises:
        BadRequest: the value has another type than content, or content that is neither a text nor a list of texts.
    """
    kind, content = value.get("type"), value.get("content")
    if kind != "content":
        raise BadRequest(f"prediction.type must be 'content', got {kind!r}.", param=f"{FIELD}.type")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("prediction.content must be a text or a list of text parts.", param=f"{FIELD}.content")
    return "".join(_read_part(part, at) for at, part in enumerate(content))


def _read_part(part: Json, at: int) -> str:
    """Returns the text of part number ``at``."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise BadRequest(
            f"prediction.content[{at}] must be a text part: {{'type': 'text', 'text': ...}}.",
            param=f"{FIELD}.content[{at}]",
        )
    return text


def check_prediction(value: JsonObject, choices: int, calls: bool) -> None:
    """Checks a prediction against the rest of its request.

    Args:
        choices: number of requested answers; ``calls``: True if the answer may call tools.

    Raises:
        BadRequest: the prediction is malformed, or is sent with several answers or with tools.
    """
    read_prediction(value)
    if choices > 1:
        raise BadRequest(f"prediction is about one answer, but n is {choices}.", param=FIELD)
    if calls:
        raise BadRequest("prediction cannot be used with tools; leave it out, or send tool_choice 'none'.", param=FIELD)


RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that requests set by separate fields."""
MAX_MESSAGES = 8192
"""Most messages of a conversation."""
MOST_NAMED = 64
"""Most variables that are searched for in the template; a request may have a million."""


def list_unread_variables(context: FieldContext, kwargs: JsonObject | None, **fields: Json) -> Iterator[str]:
    """Yields the names of the variables in a request that the chat template does not read."""
    yield from (name for name, value in fields.items() if value and not context.mentions(name))
    for name in islice(kwargs or {}, MOST_NAMED):
        if name in RESERVED or not context.mentions(name):
            yield f"chat_template_kwargs.{name}"


class ChatRequest(GenerateRequest):
    """A conversation to continue. ``prompts.chat_messages`` checks the messages and names the place of an error."""

    plain: ClassVar[frozenset[str]] = GenerateRequest.plain | {"messages"}
    bulky: ClassVar[tuple[str, ...]] = (
        *GenerateRequest.bulky, "messages", "tools", "documents", "chat_template", "chat_template_kwargs", "prediction"
    )  # fmt: skip
    messages: list[Json]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = False
    top_logprobs: Int | None = None
    tools: Objects | None = None
    tool_choice: Text | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool = True
    service_tier: Text | None = None
    modalities: Texts | None = None
    prediction: Object | None = None
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
        check_tools(self.tools, self.tool_choice)
        if is_subset(self.tool_choice):  # an assigned field counts as sent
            self.tools, self.tool_choice = select_allowed_tools(self.tools, self.tool_choice)
        if self.reasoning_effort is not None and self.reasoning_effort not in REASONING_EFFORTS:
            raise BadRequest(
                f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}.", param="reasoning_effort"
            )
        if any(m != "text" for m in self.modalities or []):
            raise BadRequest("only the modality 'text' is supported.", param="modalities")
        if self.prediction is not None:
            check_prediction(self.prediction, self.n or 1, self.may_call)

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body."""
        yield from super().list_unused_fields(context)
        if self.parallel_tool_calls is not None and not self.may_call:
            yield "parallel_tool_calls"
        if self.service_tier is not None:
            yield "service_tier"
        if self.reasoning_effort is not None and not any(
            context.mentions(v) for v in self.get_effort_variables(context.mentions)
        ):
            yield "reasoning_effort"
        if not self.include_reasoning and not context.reasoning:
            yield "include_reasoning"
        if self.add_special_tokens:
            yield "add_special_tokens"
        if self.prediction is not None and self.use_beam_search:
            yield "prediction"
        if self.echo and not self.get_echo_text():
            yield "echo"
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            yield "max_tokens"
        yield from list_unread_variables(context, self.chat_template_kwargs, tools=self.tools, documents=self.documents)

    def get_echo_text(self, role: str = "assistant") -> str:
        """Returns the text before the answer with ``echo``: that of the last message, if it has the answer's
        ``role``.
        """
        last = self.messages[-1] if self.messages else None
        if not self.echo or not isinstance(last, dict):
            return ""
        if last.get("role") != role and not self.continue_final_message:
            return ""
        content = last.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = (p.get("text") if isinstance(p, dict) else p for p in parts)
        return "".join(text for text in texts if isinstance(text, str))

    @property
    def continued_role(self) -> str:
        """The role whose message the answer continues; empty: the answer is a message of its own."""
        last = self.messages[-1] if self.continue_final_message else None
        return str(last.get("role", "")) if isinstance(last, dict) else ""

    @property
    def may_call(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def get_effort_variables(
        self, mentions: Callable[[str], bool], efforts: Mapping[str, str] | None = None
    ) -> JsonObject:
        """Returns template variables for ``reasoning_effort``; some templates can only switch reasoning on or off.

        Args:
            mentions: see FieldContext.
            efforts: what the template sees for an effort, if not the effort itself (``--reasoning-effort-map``).
        """
        if self.reasoning_effort is None:
            return {}
        made: JsonObject = {"reasoning_effort": (efforts or {}).get(self.reasoning_effort, self.reasoning_effort)}
        if self.reasoning_effort == "none" and mentions("enable_thinking"):
            made["enable_thinking"] = False
        return made

    @property
    def shows_tokens(self) -> bool:
        """See GenerateRequest."""
        return bool(self.logprobs)

    @property
    def opens_answer(self) -> bool:
        """True if the template opens the assistant's message: the request's value, else True unless the last message
        is continued.
        """
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


class CalledFunction(Strict):
    """A function and its arguments, a JSON text as the model wrote it."""

    name: str
    arguments: str


class MessageToolCall(Strict):
    """A call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """The assistant's answer. ``reasoning_content`` is another name of ``reasoning``, and absent without it."""

    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[MessageToolCall] = Field(default_factory=list, exclude_if=lambda v: not v)
    reasoning: str | None = None
    reasoning_content: str | None = Field(default=None, exclude_if=lambda v: v is None)


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
    prompt_logprobs: list[JsonObject | None] | None = None
    prompt_token_ids: list[int] | None = None


class DeltaFunction(Strict):
    """The name, in a call's first part, and more of its arguments."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(Strict):
    """What a chunk adds to a call; ``id`` and ``type`` come once."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction


class DeltaMessage(Strict):
    """What a chunk adds; only set fields are sent."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


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
    prompt_token_ids: list[int] | None = None


MOST_MESSAGES = 8192
"""Most messages of a conversation."""


class BatchChatRequest(ChatRequest):
    """``messages`` is a list of conversations; each is answered once."""

    plain: ClassVar[frozenset[str]] = frozenset()
    messages: list[list[Json]] = Field(min_length=1)

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
