"""Prompts in the forms that offline callers pass: text, ids, or an object with media; their adapters and progress bar.

``LoRARequest`` says which adapter answers a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NotRequired, TypeAlias, TypedDict

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import JsonMapping
from trencadis.core.request import AdapterRef, SamplingParams
from trencadis.multimodal.media_options import MediaPart, media_scope, part_uuid
from trencadis.outputs import RequestOutput
from trencadis.server.config.model_download import find_adapter_folder
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.grammars.response_format import find_requested_format
from trencadis.server.prompts.adapter_registry import AdapterRegistry
from trencadis.server.prompts.answer_grammar import add_answer_grammar, add_rule
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.prompts.text_service import TextService
from trencadis.server.protocol.pooling_params import PoolingParams
from trencadis.server.tools.reasoning_format_registry import find_reasoning_format


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


def add_sampling_rule(service: TextService, prompt: Prompt, params: SamplingParams) -> None:
    """Attaches the token rule that ``params`` require to a prompt; the reasoning format is read from the chat template.

    Raises:
        BadRequest: an id is outside of the vocabulary, there are too many bad words, or there is a thinking budget for
            a model without reasoning marks.
    """
    form = find_reasoning_format("auto", service.template.source if service.template is not None else None)
    add_rule(prompt, params, service.tokenizer, service.limits.vocab, form)


async def apply_structured_outputs(
    grammars: GrammarCache, service: TextService, prompt: Prompt, params: SamplingParams
) -> SamplingParams:
    """Attaches the grammar that ``params`` require to a prompt; returns the parameters without it, as the engine
    accepts them.

    Raises:
        BadRequest: no grammar can be built for the format, or both fields are set.
    """
    given, guided = params.structured_outputs, params.guided_decoding
    if given is None and guided is None:
        return params
    if given is not None and guided is not None:
        raise BadRequest("structured_outputs and guided_decoding are the same; give one.", param="guided_decoding")
    one = given or guided
    held = one if isinstance(one, Mapping) else one.as_fields() if one is not None else {}
    await add_answer_grammar(
        grammars, AnswerParsers(), service.tokenizer, prompt, find_requested_format(None, held, {})
    )
    return replace(params, structured_outputs=None, guided_decoding=None)


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


UseTqdm = bool | Callable[..., Any]
"""True to show a bar, or a callable that creates one instead of tqdm."""


class PromptProgressBar:
    """Shows the number of finished prompts and tokens per second.

    Args:
        use: True shows a bar for more than one prompt, a callable that creates a bar always shows one.
    """

    def __init__(self, total: int, use: UseTqdm) -> None:
        self._bar: Any = None
        if callable(use) or (use and total > 1):
            from tqdm.auto import tqdm

            make = use if callable(use) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._start = time.perf_counter()
        self._in = self._out = 0

    def step(self, output: RequestOutput) -> None:
        """Counts one more finished prompt."""
        if self._bar is None:
            return
        self._in += len(output.prompt_token_ids)
        self._out += sum(len(o.token_ids) for o in output.outputs)
        seconds = max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(f"in {self._in / seconds:.1f}, out {self._out / seconds:.1f} tokens/s", refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name.

    Args:
        lora_int_id: a number from 1; it has no effect, since adapters are told apart by their contents.
        lora_path: a folder with PEFT's files, or a hub id.
        base_model_name: has no effect.
        load_inplace: reads the files again although the name is known.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise BadRequest(f"lora_int_id must be at least 1, got {self.lora_int_id}.", param="lora_int_id")
        if not self.lora_path:
            raise BadRequest("lora_path must name a folder or a hub id.", param="lora_path")

    @property
    def name(self) -> str:
        """The name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The folder or hub id."""
        return self.lora_path


LoRARequests: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, one for each (None: the base model), or none."""


class OfflineAdapters:
    """The adapters of an engine that is used offline; each is read when a prompt first names it.

    Args:
        model: the base model, which adapters must fit.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self._registry: AdapterRegistry | None = None
        if engine.enable_lora:
            self._registry = AdapterRegistry(model, engine, (engine.model,), partial(find_adapter_folder, engine))

    def find(self, asked: LoRARequest | None) -> AdapterRef | None:
        """Returns the adapter of a prompt; reads it if its name is new or has another path.

        Raises:
            BadRequest: it cannot be read, does not fit, or the engine takes no adapters.
        """
        if asked is None:
            return None
        if self._registry is None:
            raise BadRequest("lora_request needs an engine made with enable_lora=True.", param="lora_request")
        if not isinstance(asked, LoRARequest):
            raise BadRequest(f"lora_request must be a LoRARequest, not {type(asked).__name__}.", param="lora_request")
        served = self._registry.served
        known = served.get(asked.lora_name)
        if known is not None and known.root == asked.lora_path and not asked.load_inplace:
            return known.ref
        try:
            if known is None and len(served) >= self._registry.most:
                del served[next(iter(served))]  # offline, nothing unloads adapters
            return self._registry.add(asked.lora_name, asked.lora_path, replace=True).ref
        except StartupError as error:
            raise BadRequest(f"The adapter cannot be loaded: {error}", param="lora_request") from None

    def find_all(self, asked: LoRARequests, count: int) -> list[AdapterRef | None]:
        """Returns the adapter of each of ``count`` prompts.

        Raises:
            BadRequest: as ``find``, or the numbers of prompts and adapters differ.
        """
        if asked is None or not isinstance(asked, Sequence):
            return [self.find(asked)] * count
        if len(asked) != count:
            raise BadRequest(f"{count} prompts came with {len(asked)} lora requests.", param="lora_request")
        return [self.find(one) for one in asked]
