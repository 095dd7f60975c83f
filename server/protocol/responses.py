"""/v1/responses: the request.

/v1/responses: the answer and its items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

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
from trencadis.server.protocol.chat_completions import TokenLogprobs

LOGPROBS = "message.output_text.logprobs"
INCLUDE = frozenset({
    LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
})  # fmt: skip
"""Values that ``include`` may have. All but the first belong to tools or memory that this server does not have."""
STATELESS = "this server keeps no responses: send the whole conversation as input"
REFUSED = {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "background": "background responses are not supported: send the request without it",
    "prompt": "prompt templates are not supported: send instructions and input",
}


class ResponsesRequest(TranslatedRequest):
    """A conversation as text or items. ``server.dialects`` checks the items and names the place of an error."""

    bulky: ClassVar[tuple[str, ...]] = (*TranslatedRequest.bulky, "input")

    input: Text | list[Json] | None = None
    instructions: Text | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    tools: Objects | None = None
    tool_choice: Text | Object | None = None
    parallel_tool_calls: bool | None = None
    text: Object | None = None
    reasoning: Object | None = None
    include: Texts | None = None
    top_logprobs: Int | None = None
    metadata: dict[Text, Text] | None = None
    truncation: Text | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Text | None = None
    conversation: Text | Object | None = None
    prompt: Object | None = None
    service_tier: Text | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    def check(self) -> None:
        """See GenerateRequest; adds what only responses have."""
        super().check()
        for name, why in REFUSED.items():
            if getattr(self, name):
                raise BadRequest(f"{name}: {why}.", param=name)
        if self.truncation not in (None, "auto", "disabled"):
            raise BadRequest("truncation must be 'auto' or 'disabled'.", param="truncation")
        for i, name in enumerate(self.include or []):
            if name not in INCLUDE:
                raise BadRequest(f"include[{i}] is {name[:60]!r}, which no response has.", param=f"include[{i}]")
        if len(self.metadata or {}) > 16:
            raise BadRequest("metadata holds at most 16 entries.", param="metadata")

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body."""
        yield from super().list_unused_fields(context)
        for name in ("store", "max_tool_calls", "service_tier", "user", "safety_identifier", "prompt_cache_key"):
            if getattr(self, name):
                yield name
        yield from (f"include.{name}" for name in self.include or [] if name != LOGPROBS)
        for name, known in (("text", ("format",)), ("reasoning", ("effort",))):
            found = getattr(self, name) or {}
            yield from (f"{name}.{key}" for key, value in found.items() if key not in known and value is not None)

    @property
    def shows_tokens(self) -> bool:
        """See GenerateRequest."""
        return LOGPROBS in (self.include or []) or bool(self.top_logprobs)


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Strict):
    """The text of a message. ``logprobs`` is never missing, because clients' types want it."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Json] = Field(default_factory=list)
    logprobs: list[TokenLogprobs] = Field(default_factory=list)


class OutputMessage(Strict):
    """What the model says."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class ReasoningText(Strict):
    """The text of a thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(Strict):
    """What the model thinks."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Json] = Field(default_factory=list)
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCallItem(Strict):
    """A call; ``arguments`` is a JSON text as the model wrote it."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(Strict):
    """Kinds of the input's tokens."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Strict):
    """Kinds of the output's tokens."""

    reasoning_tokens: int = 0


class ResponsesUsage(Strict):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Strict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponsesFault(Strict):
    """Why a response failed."""

    code: str
    message: str


class ResponsesResponse(Strict):
    """The whole answer, with what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponsesFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    model: str
    output: list[OutputItem] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    prompt_cache_key: str | None = None
    reasoning: JsonObject
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float | None = None
    text: JsonObject
    tool_choice: str | JsonObject = "auto"
    tools: list[JsonObject] = Field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None


class InputTokens(Strict):
    """Tokens of a prompt, with its images."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
