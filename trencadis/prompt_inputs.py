"""Prompts in the forms that offline callers pass: text, ids, or an object with media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonMapping
from trencadis.core.request import SamplingParams
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaPart, media_scope, part_uuid
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.protocol.pooling_params import PoolingParams


class _MediaFields(TypedDict):
    multi_modal_data: NotRequired[Mapping[str, object] | None]
    mm_processor_kwargs: NotRequired[JsonMapping | None]
    multi_modal_uuids: NotRequired[JsonMapping | None]
    cache_salt: NotRequired[str | None]


class TextPrompt(_MediaFields):
    """A prompt as text, with its media."""

    prompt: str


class TokensPrompt(_MediaFields):
    """A prompt as ids, with its media; ``prompt`` is its text, if the caller has it."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
_UNSUPPORTED_KEYS = {"prompt_embeds": "prompt embeddings", "encoder_prompt": "encoder-decoder models"}


async def read_prompt(service: TextService, prompt: PromptType, params: SamplingParams | PoolingParams) -> Prompt:
    """Returns a prompt with its media prepared, cut to ``params.truncate_prompt_tokens``.

    Raises:
        BadRequest: the prompt is empty, too long or malformed, or a medium is invalid.
    """
    cut = params.truncate_prompt_tokens
    if isinstance(prompt, str):
        return await service.make_raw_prompt(prompt, truncate=cut)
    if not isinstance(prompt, Mapping):
        return await service.make_raw_prompt(list(prompt), truncate=cut)
    text = _text_or_ids(prompt)
    parts = _media_parts(prompt)
    if not parts:
        made = await service.make_raw_prompt(text, truncate=cut)
        made.salt = str(prompt.get("cache_salt") or "")
    else:
        if cut is not None:
            raise BadRequest("A prompt with images or videos cannot be truncated.", param="truncate_prompt_tokens")
        scope = media_scope(str(prompt.get("cache_salt") or ""), prompt.get("mm_processor_kwargs"))
        made = await service.make_media_prompt(text, parts, scope)
    made.text = made.text if made.text is not None else prompt.get("prompt")
    return made


def check_priority(priority: int, policy: str) -> None:
    """Raises BadRequest if a priority is set and the scheduler ignores priorities."""
    if priority and policy != "priority":
        raise BadRequest('priority needs an engine with scheduling_policy="priority".', param="priority")


def as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Returns one prompt or several as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(i, int) for i in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _text_or_ids(prompt: Mapping[str, Any]) -> str | list[int]:
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if ids is not None:
        return list(ids)
    if isinstance(text, str):
        return text
    if text is not None:
        return list(text)
    for name, what in _UNSUPPORTED_KEYS.items():
        if name in prompt:
            raise BadRequest(f"{name} is not supported: {what}.", param="prompt")
    raise BadRequest("A prompt object needs 'prompt' or 'prompt_token_ids'.", param="prompt")


def _media_parts(prompt: Mapping[str, Any]) -> list[MediaPart]:
    data = prompt.get("multi_modal_data") or {}
    unknown = set(data) - {"image", "video"}
    if unknown:
        name = sorted(unknown)[0]
        raise BadRequest(f"multi_modal_data holds {name!r}; 'image' and 'video' are supported.", param="prompt")
    sources = {"image": _image_sources(data.get("image", [])), "video": _video_sources(data.get("video", []))}
    parts = [
        MediaPart(source, f"multi_modal_data.{kind}[{i}]", kind=kind)
        for kind, some in sources.items()
        for i, source in enumerate(some)
    ]
    uuids = _uuids(prompt.get("multi_modal_uuids") or {}, sources)
    return [p._replace(uuid=part_uuid({"uuid": u}, p.path)) for p, u in zip(parts, uuids, strict=True)]


def _uuids(given: Mapping[str, object], sources: Mapping[str, Sequence[object]]) -> list[object]:
    """Returns the uuid, or None, of every source in order."""
    uuids: list[object] = []
    for kind, some in sources.items():
        found = given.get(kind) or [None] * len(some)
        found = list(found) if isinstance(found, list | tuple) else [found]
        if len(found) != len(some):
            raise BadRequest(f"{len(some)} {kind}s came with {len(found)} uuids.", param="multi_modal_uuids")
        uuids += found
    return uuids


def _image_sources(given: Any) -> list[object]:
    """Returns the sources of images: one image, a list, or an array of several."""
    several = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 4
    return list(given) if several else [given]


def _video_sources(given: object) -> list[object]:
    """Returns the sources of videos: one (a list of frames is one), or a list of lists, tuples or arrays of frames."""
    if not isinstance(given, list | tuple):
        return [given]
    several = all(isinstance(one, list | tuple) or getattr(one, "ndim", 0) == 4 for one in given)
    return list(given) if several else [list(given)]
