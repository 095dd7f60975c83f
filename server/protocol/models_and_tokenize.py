"""/v1/models, /tokenize and /detokenize; loading and unloading of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trencadis.core.json_types import Json
from trencadis.server.protocol.base_request import (
    Body,
    FieldContext,
    ImageDetails,
    Ints,
    MediaRequest,
    Object,
    Objects,
    Strict,
    Text,
    VideoDetails,
)
from trencadis.server.protocol.chat_completions import list_unread_variables


class Permission(Strict):
    """OpenAI's former permission object; some clients still read it."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Strict):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trencadis"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[Permission] = Field(default_factory=list)


class ModelList(Strict):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(MediaRequest):
    """A raw prompt, or a conversation (with images: placeholders are expanded)."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Json] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: Object | None = None
    tools: Objects | None = None

    def list_unused_fields(self, context: FieldContext) -> Iterator[str]:
        """See Body. Template options have no effect on a raw prompt, nor ``add_special_tokens`` on a conversation."""
        if self.messages is not None:
            if self.add_special_tokens:
                yield "add_special_tokens"
            yield from list_unread_variables(context, self.chat_template_kwargs, tools=self.tools)
            return
        if self.return_image_sizes:
            yield "return_image_sizes"
        for name in ("cache_salt", "mm_processor_kwargs", "continue_final_message", "chat_template",
                     "chat_template_kwargs", "tools"):  # fmt: skip
            if getattr(self, name):
                yield name
        if not self.add_generation_prompt:
            yield "add_generation_prompt"


class TokenizeResponse(Strict):
    """The ids of a prompt; with ``return_image_sizes`` what the model sees of its media."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    images: list[ImageDetails] | None = Field(default=None, exclude_if=lambda v: v is None)
    videos: list[VideoDetails] | None = Field(default=None, exclude_if=lambda v: v is None)


class DetokenizeRequest(Body):
    """Ids to read."""

    model: Text | None = None
    tokens: Ints


class DetokenizeResponse(Strict):
    """Their text."""

    prompt: str


class LoadAdapterRequest(Body):
    """Loads an adapter as ``lora_name``.

    Args:
        lora_path: a folder inside ``--allowed-lora-path``, or a hub id.
        load_inplace: replaces an adapter of this name; requests that run finish with the earlier one.
        base_model_name: the card's ``parent``; None: the served model.
    """

    lora_name: Text
    lora_path: Text
    load_inplace: bool = False
    base_model_name: Text | None = None


class UnloadAdapterRequest(Body):
    """Unloads the adapter ``lora_name``; ``lora_int_id`` has no effect."""

    lora_name: Text
    lora_int_id: int | None = None
