"""/v1/completions: request, response and stream chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonObject
from trencadis.server.protocol.base_request import (
    FieldContext,
    GenerateRequest,
    Int,
    Ints,
    Strict,
    Text,
    Texts,
    Usage,
    split_raw_prompts,
)


class CompletionRequest(GenerateRequest):
    """One prompt or several, as text or ids."""

    plain: ClassVar[frozenset[str]] = GenerateRequest.plain | {"prompt"}
    bulky: ClassVar[tuple[str, ...]] = (*GenerateRequest.bulky, "prompt")

    prompt: Text | Ints | Texts | Annotated[list[Ints], Field(fail_fast=True)] | None = None
    max_tokens: Int | None = 16
    logprobs: Int | None = None
    echo: bool | None = False
    suffix: Text | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        """See GenerateRequest; adds what only completions have."""
        super().check()
        if self.suffix is not None:
            raise BadRequest("suffix is not currently supported.", param="suffix")
        if self.prompt is None:
            raise BadRequest("prompt is required.", param="prompt")
        if self.stream and self.echo and self.logprobs is not None:
            raise BadRequest("echo with logprobs cannot be streamed.", param="echo")

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body. A raw prompt holds no media."""
        yield from super().list_unused_fields(context)
        for name in ("mm_processor_kwargs", "return_image_sizes"):
            if getattr(self, name):
                yield name

    @property
    def is_plain(self) -> bool:
        """See GenerateRequest."""
        return self.prompt is not None and super().is_plain

    @property
    def shows_tokens(self) -> bool:
        """See GenerateRequest."""
        return self.logprobs is not None

    def list_prompts(self) -> list[str | list[int]]:
        """Returns one entry per prompt.

        Raises:
            BadRequest: there is none, or one of them is empty.
        """
        found = split_raw_prompts(self.prompt)
        if not found or any(len(p) == 0 for p in found):
            raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        return found


class CompletionLogprobs(Strict):
    """Parallel lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Strict):
    """One answer, or one event's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[JsonObject | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(Strict):
    """The whole answer, or (streaming) one event: both have the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: Usage | None = None
