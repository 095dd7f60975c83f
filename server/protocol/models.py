"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trencadis.server.protocol.base import Int, MediaRequest, Strict
from trencadis.server.protocol.fields import Object, Objects, Text


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

    model_config = ConfigDict(extra="allow")

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: Object | None = None
    tools: Objects | None = None


class TokenizeResponse(Strict):
    """The ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """Ids to read."""

    model_config = ConfigDict(extra="allow")

    model: Text | None = None
    tokens: list[Int]


class DetokenizeResponse(Strict):
    """Their text."""

    prompt: str
