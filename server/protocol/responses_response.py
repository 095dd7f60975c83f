"""/v1/responses: the answer and its items."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trencadis.server.protocol.base_request import Strict
from trencadis.server.protocol.chat_completions import TokenLogprobs

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Strict):
    """The text of a message. ``logprobs`` is never missing, because clients' types want it."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
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
    summary: list[Any] = Field(default_factory=list)
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
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None


class InputTokens(Strict):
    """Tokens of a prompt, with its images."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
