"""Offline use: the engine in this process, prompts in, answers out.

from trencadis import LLM, SamplingParams
llm = LLM(model="path/or/hub-id")
print(llm.chat([{"role": "user", "content": "Who are you?"}])[0].outputs[0].text)
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from trencadis.core.checkpoint.model_config import ModelConfig, load_config
from trencadis.core.config import EngineConfig
from trencadis.core.errors import BadRequest, from_status
from trencadis.core.progress import Progress
from trencadis.core.request import Delta, RequestStats, SamplingParams, TokenLogprob
from trencadis.core.startup.build import create_engine
from trencadis.keywords import engine_config, local_model, template_text
from trencadis.multimodal.gather import gather_or_cancel
from trencadis.multimodal.images.cache import PreparedCache
from trencadis.multimodal.images.frontend import ImageFrontend, ImageLimits
from trencadis.multimodal.images.limits import server_options
from trencadis.multimodal.images.processor import ImageProcessor
from trencadis.multimodal.options import MediaPart, media_scope, part_uuid
from trencadis.multimodal.sources.loader import MediaLoader
from trencadis.multimodal.videos.frontend import FETCH_TIMEOUT, VideoFrontend, VideoLimits
from trencadis.server.prompts.output import ChoiceStream
from trencadis.server.prompts.service import ImageSize, Prompt, TextService

T = TypeVar("T")
PromptLike = str | Sequence[int] | Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt's answer; ``outputs`` holds its ``n`` choices, ``images`` what each image was resized to."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    num_image_tokens: int = 0
    images: list[ImageSize] = field(default_factory=list)
    stats: RequestStats | None = None


@dataclass(slots=True)
class _Live:
    output: RequestOutput
    streams: list[ChoiceStream]
    pixels: list[Any]
    open: int


class LLM:
    """The engine, its tokenizer and its image processor in one process.

    Args:
        model: checkpoint folder or hub id; none: the bundled demo.
        allowed_local_media_path: folder that ``file:`` URLs may read from. Bare paths (``{"type": "image", "image":
            "a.png"}``) name any file.
        allowed_media_domains: hosts that media may be fetched from; none: every public one.
        chat_template: a Jinja file, or the template itself; none: the model's.
        flags: every flag of ``serve`` that concerns the engine, e.g. ``max_model_len=4096, dtype="float32"``; texts
            are read as on the command line (``kv_cache_memory_bytes="256MiB"``), None is the default, and what the
            command line takes without effect (``task="generate"``) is taken here.
        progress: told of each phase of the start-up.

    Raises:
        StartupError: one line that says what does not fit or is not supported.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        allowed_local_media_path: str | Path = "",
        allowed_media_domains: Sequence[str] = (),
        chat_template: str | Path = "",
        progress: Progress | None = None,
        **flags: Any,
    ) -> None:
        self.config = local_model(engine_config(str(model), flags))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="llm-io").start()
        self.engine = create_engine(self.config, progress)
        model_config = load_config(Path(self.config.model))
        root = Path(allowed_local_media_path) if allowed_local_media_path else None
        images = _images(model_config, self.config, MediaLoader(allowed_media_domains, root, any_path=True))
        self._images = images
        self._videos: VideoFrontend | None = None
        slow = MediaLoader(allowed_media_domains, root, timeout=FETCH_TIMEOUT, any_path=True)
        if images is not None and model_config.video_token >= 0:
            self._videos = _videos(self.config, images, slow)
        self.service = TextService.load(
            model_config, self.config, images=images, videos=self._videos, chat_template=str(chat_template)
        )
        self.service.max_model_len = self.engine.info().max_model_len
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues raw prompts: strings, token ids, ``{"prompt": ..., "multi_modal_data": {"image": one or a list,
        "video": ...}}``, or a list of these. A prompt holds one placeholder per image (``<|image_pad|>``) and video
        (``<|video_pad|>``). An image is a path, URL, file's bytes, PIL image, or an array of numpy or torch: [height,
        width, channels] or [channels, height, width] with 3 or 4 channels, uint8 or floats between 0 and 1. A video is
        a path, URL, file's bytes, array with one axis more or list of frames; several are a list of lists or arrays.
        Beside the data may stand ``mm_processor_kwargs`` (fps, max_pixels ...; they hold for all),
        ``multi_modal_uuids`` (``{"image": one or a list}``) and ``cache_salt``.

        Raises:
            BadRequest: a prompt or a parameter is at fault.
        """
        items = _as_list(prompts)
        made = self._wait(gather_or_cancel(self._raw(p) for p in items))
        return self._run(made, self._params(sampling_params, len(made)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them. Content parts are OpenAI's or qwen-vl-utils': ``{"type": "image",
        "image": path, URL, PIL image, array or bytes, "max_pixels": ...}``, ``{"type": "video", "video": path, URL,
        bytes, array or list of frames, "fps": ...}``. Arrays are numpy's or torch's, as ``generate`` says.

        Args:
            chat_template: a Jinja file, or the template itself, instead of the model's.
            mm_processor_kwargs: min_pixels, max_pixels of every image, below the limits that the LLM was made with.
            cache_salt: blocks and images are shared with equal salts only.

        Raises:
            BadRequest: a message or a parameter is at fault.
        """
        scope = media_scope(cache_salt, mm_processor_kwargs)
        template = template_text(chat_template)
        talks: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        made = self._wait(
            gather_or_cancel(
                self.service.chat_prompt(
                    talk,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    kwargs=chat_template_kwargs,
                    chat_template=template,
                    scope=scope,
                )
                for talk in talks
            )
        )
        default = None if sampling_params is not None else [self._chat_defaults(len(p.tokens)) for p in made]
        return self._run(made, self._params(sampling_params or default, len(made)), use_tqdm)

    def get_tokenizer(self) -> Any:
        """The tokenizer (``encode``, ``decode``)."""
        return self.service.tokenizer

    def close(self) -> None:
        """Frees the engine, ends the threads and the decode workers."""
        self.engine.close()
        if self._images is not None:
            self._images.close()
        if self._videos is not None:
            self._videos.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # Prompts

    async def _raw(self, prompt: PromptLike) -> Prompt:
        if isinstance(prompt, str):
            return await self.service.raw_prompt(prompt)
        if not isinstance(prompt, Mapping):
            return await self.service.raw_prompt(list(prompt))
        data = prompt.get("multi_modal_data") or {}
        unknown = set(data) - {"image", "video"}
        if unknown:
            name = sorted(unknown)[0]
            raise BadRequest(f"multi_modal_data holds {name!r}; 'image' and 'video' are supported.", param="prompt")
        text = prompt.get("prompt", prompt.get("prompt_token_ids"))
        if text is None:
            raise BadRequest("A prompt object needs 'prompt' or 'prompt_token_ids'.", param="prompt")
        sources = {"image": _pictures(data.get("image", [])), "video": _clips(data.get("video", []))}
        parts = [
            MediaPart(source, f"multi_modal_data.{kind}[{i}]", kind=kind)
            for kind, some in sources.items()
            for i, source in enumerate(some)
        ]
        if not parts:
            return await self.service.raw_prompt(text)
        uuids = _as_names(prompt.get("multi_modal_uuids") or {}, sources)
        parts = [p._replace(uuid=part_uuid({"uuid": u}, p.path)) for p, u in zip(parts, uuids, strict=True)]
        scope = media_scope(str(prompt.get("cache_salt") or ""), prompt.get("mm_processor_kwargs"))
        return await self.service.media_prompt(text, parts, scope)

    def _chat_defaults(self, prompt: int) -> SamplingParams:
        defaults = self.service.defaults
        return replace(self._defaults(), max_tokens=defaults.limit(prompt), min_tokens=defaults.min_tokens)

    def _defaults(self) -> SamplingParams:
        v = self.service.defaults.values
        return SamplingParams(
            temperature=v["temperature"],
            top_p=v["top_p"],
            top_k=int(v["top_k"]),
            min_p=v["min_p"],
            repetition_penalty=v["repetition_penalty"],
        )

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if given is None:
            given = self._defaults()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise BadRequest(f"{count} prompts came with {len(given)} sampling parameters.", param="sampling_params")
        return given

    # Running

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], bar: bool) -> list[RequestOutput]:
        live: dict[str, _Live] = {}
        for prompt, p in zip(prompts, params, strict=True):
            request_id = f"llm-{next(self._numbers)}"
            outputs = [CompletionOutput(i, logprobs=[] if p.logprobs is not None else None) for i in range(p.n)]
            streams = [self.service.stream(p, prompt) for _ in range(p.n)]
            result = RequestOutput(request_id, prompt.text, prompt.tokens, outputs)
            result.num_image_tokens, result.images = prompt.image_tokens, prompt.image_sizes
            live[request_id] = _Live(result, streams, prompt.pixels, p.n)
            self.engine.add(prompt.request(request_id, p, arrival=time.time()))
        progress = _Bar(len(live), bar)
        try:
            while any(x.open for x in live.values()):
                for delta in self.engine.step():
                    self._take(live[delta.id], delta, progress)
                for request_id, index in self.engine.needs():
                    self.engine.media(request_id, index, live[request_id].pixels[index])
        finally:
            for request_id, x in live.items():
                if x.open:
                    self.engine.abort(request_id)
            progress.close()
            while not self.engine.idle():
                self.engine.step()
            self.engine.step()
        return [x.output for x in live.values()]

    def _take(self, x: _Live, delta: Delta, progress: _Bar) -> None:
        output, stream = x.output.outputs[delta.choice], x.streams[delta.choice]
        if output.finish_reason is not None:
            return  # what was in flight when a stop string ended it
        if delta.finish == "error":
            raise from_status(delta.status or 500, delta.message)
        piece = stream.feed(delta)
        output.text += piece.text
        output.token_ids += piece.tokens
        if output.logprobs is not None:
            output.logprobs += piece.logprobs
        x.output.num_cached_tokens = max(x.output.num_cached_tokens, stream.cached_tokens)
        x.output.prompt_logprobs = x.output.prompt_logprobs or stream.prompt_logprobs
        progress.tokens += len(piece.tokens)
        if piece.finish_reason is None:
            return
        output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
        x.output.stats = stream.stats
        if stream.stopped_early:
            self.engine.abort(delta.id, delta.choice)
        x.open -= 1
        if not x.open:
            progress.step()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Bar:
    """One line on a terminal: prompts done, tokens a second."""

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.done, self.tokens = total, 0, 0
        self._shown = shown and sys.stderr.isatty()
        self._start = time.perf_counter()

    def step(self) -> None:
        """One more prompt is done."""
        self.done += 1
        if self._shown:
            rate = self.tokens / max(time.perf_counter() - self._start, 1e-9)
            filled = 30 * self.done // self.total
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}  {rate:.1f} tokens/s")
            sys.stderr.flush()

    def close(self) -> None:
        """Ends the line."""
        if self._shown:
            sys.stderr.write("\n")


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


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(i, int) for i in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _pictures(given: Any) -> list[Any]:
    """Sources of pictures: one, a list, or an array of several."""
    several = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 4
    return list(given) if several else [given]


def _clips(given: Any) -> list[Any]:
    """Sources of videos: one (a list of frames is one), or a list of lists, tuples or arrays of frames."""
    if not isinstance(given, list | tuple):
        return [given]
    several = all(isinstance(one, list | tuple) or getattr(one, "ndim", 0) == 4 for one in given)
    return list(given) if several else [list(given)]


def _images(model: ModelConfig, config: EngineConfig, loader: MediaLoader) -> ImageFrontend | None:
    if model.vision is None:
        return None
    return ImageFrontend(
        ImageProcessor.from_checkpoint(model.path, config.mm_processor_kwargs, config.image_alignment),
        loader,
        PreparedCache(int(config.mm_processor_cache_gb * 2**30)),
        ImageLimits(images=config.limit_mm_per_prompt.get("image", ImageLimits.images)),
    )


def _videos(config: EngineConfig, images: ImageFrontend, loader: MediaLoader) -> VideoFrontend:
    limits = VideoLimits(config.limit_mm_per_prompt.get("video", VideoLimits.videos))
    options = server_options(config.mm_processor_kwargs).videos
    return VideoFrontend(images.processor, loader, images.cache, images.decoder, limits, images.uuids, options)
