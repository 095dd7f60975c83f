"""Prompts as offline callers write them: text, ids, or an object with media beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NotRequired, TypedDict

from trencadis.core.errors import BadRequest
from trencadis.core.request import SamplingParams
from trencadis.multimodal.options import MediaPart, media_scope, part_uuid
from trencadis.server.grammars.asked import asked_form
from trencadis.server.grammars.book import GrammarBook
from trencadis.server.pooling.params import PoolingParams
from trencadis.server.prompts.answer_forms import AnswerForms
from trencadis.server.prompts.constraints import constrain
from trencadis.server.prompts.prompt import Prompt
from trencadis.server.prompts.rules import add_rule
from trencadis.server.prompts.service import TextService
from trencadis.server.reasoning.forms import reasoning_form


class _MediaFields(TypedDict):
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    cache_salt: NotRequired[str | None]


class TextPrompt(_MediaFields):
    """A prompt as text, with its media."""

    prompt: str


class TokensPrompt(_MediaFields):
    """A prompt as ids, with its media; ``prompt`` is its text, where the caller has it."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
_OTHER = {"prompt_embeds": "prompt embeddings", "encoder_prompt": "encoder-decoder models"}


async def read_prompt(service: TextService, prompt: PromptType, params: SamplingParams | PoolingParams) -> Prompt:
    """A prompt with its media prepared, cut to ``params.truncate_prompt_tokens``.

    Raises:
        BadRequest: it is empty, too long or of another shape, or a medium is at fault.
    """
    cut = params.truncate_prompt_tokens
    if isinstance(prompt, str):
        return await service.raw_prompt(prompt, truncate=cut)
    if not isinstance(prompt, Mapping):
        return await service.raw_prompt(list(prompt), truncate=cut)
    text = _content(prompt)
    parts = _parts(prompt)
    if not parts:
        made = await service.raw_prompt(text, truncate=cut)
        made.salt = str(prompt.get("cache_salt") or "")
    else:
        if cut is not None:
            raise BadRequest("A prompt with images or videos cannot be truncated.", param="truncate_prompt_tokens")
        scope = media_scope(str(prompt.get("cache_salt") or ""), prompt.get("mm_processor_kwargs"))
        made = await service.media_prompt(text, parts, scope)
    made.text = made.text if made.text is not None else prompt.get("prompt")
    return made


def rule_of(service: TextService, prompt: Prompt, params: SamplingParams) -> None:
    """Gives a prompt the rule that ``params`` ask for; its template tells how the model marks thoughts.

    Raises:
        BadRequest: an id is outside of the vocabulary, there are too many bad words, or a thinking budget has
            no marks of thoughts to go by.
    """
    form = reasoning_form("auto", service.template.source if service.template is not None else None)
    add_rule(prompt, params, service.tokenizer, service.limits.vocab, form)


async def formed(book: GrammarBook, service: TextService, made: Prompt, params: SamplingParams) -> SamplingParams:
    """Gives a prompt the grammar that ``params`` ask for; returns them without it, as the engine takes them.

    Raises:
        BadRequest: the form has no grammar, or there are two.
    """
    given, guided = params.structured_outputs, params.guided_decoding
    if given is None and guided is None:
        return params
    if given is not None and guided is not None:
        raise BadRequest("structured_outputs and guided_decoding are the same; give one.", param="guided_decoding")
    one = given or guided
    held = one if isinstance(one, Mapping) else one.as_fields() if one is not None else {}
    await constrain(book, AnswerForms(), service.tokenizer, made, asked_form(None, held, {}))
    return replace(params, structured_outputs=None, guided_decoding=None)


def check_priority(priority: int, policy: str) -> None:
    """Raises BadRequest where the scheduler does not heed priorities."""
    if priority and policy != "priority":
        raise BadRequest('priority needs an engine with scheduling_policy="priority".', param="priority")


def as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or several as several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(i, int) for i in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _content(prompt: Mapping[str, Any]) -> str | list[int]:
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if ids is not None:
        return list(ids)
    if isinstance(text, str):
        return text
    if text is not None:
        return list(text)
    for name, what in _OTHER.items():
        if name in prompt:
            raise BadRequest(f"{name} is not supported: {what}.", param="prompt")
    raise BadRequest("A prompt object needs 'prompt' or 'prompt_token_ids'.", param="prompt")


def _parts(prompt: Mapping[str, Any]) -> list[MediaPart]:
    data = prompt.get("multi_modal_data") or {}
    unknown = set(data) - {"image", "video"}
    if unknown:
        name = sorted(unknown)[0]
        raise BadRequest(f"multi_modal_data holds {name!r}; 'image' and 'video' are supported.", param="prompt")
    sources = {"image": _images(data.get("image", [])), "video": _clips(data.get("video", []))}
    parts = [
        MediaPart(source, f"multi_modal_data.{kind}[{i}]", kind=kind)
        for kind, some in sources.items()
        for i, source in enumerate(some)
    ]
    uuids = _as_names(prompt.get("multi_modal_uuids") or {}, sources)
    return [p._replace(uuid=part_uuid({"uuid": u}, p.path)) for p, u in zip(parts, uuids, strict=True)]


def _as_names(given: Mapping[str, Any], sources: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The uuid, or None, of every source in order."""
    names: list[Any] = []
    for kind, some in sources.items():
        found = given.get(kind) or [None] * len(some)
        found = list(found) if isinstance(found, list | tuple) else [found]
        if len(found) != len(some):
            raise BadRequest(f"{len(some)} {kind}s came with {len(found)} uuids.", param="multi_modal_uuids")
        names += found
    return names


def _images(given: Any) -> list[Any]:
    """Sources of images: one image, a list, or an array of several."""
    several = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 4
    return list(given) if several else [given]


def _clips(given: Any) -> list[Any]:
    """Sources of videos: one (a list of frames is one), or a list of lists, tuples or arrays of frames."""
    if not isinstance(given, list | tuple):
        return [given]
    several = all(isinstance(one, list | tuple) or getattr(one, "ndim", 0) == 4 for one in given)
    return list(given) if several else [list(given)]
