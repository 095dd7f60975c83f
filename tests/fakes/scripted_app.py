"""A scripted engine, a service over the small tokenizer, and an application over both: requests without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
from fastapi import FastAPI

from tests.oracles.openapi_checks import check_declared
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.errors import BadRequest, TrencadisError, from_status
from trencadis.core.media_spans import MediaSpan
from trencadis.core.process.engine_messages import Add, EngineInfo, EngineStats, GraphPlan, Phase, frame
from trencadis.core.request import Delta, Request, RequestStats, SamplingParams, TokenLogprob
from trencadis.multimodal.decode_workers.worker_pool import WorkerPool
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaPart, MediaScope
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import Qwen25VisionConfig as VisionConfig
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.engine.engine_client_and_request_timing import DeltaCallback
from trencadis.server.grammars.grammar_cache import JOBS
from trencadis.server.http.fastapi_app import create_app
from trencadis.server.prompts.multimodal_inputs import ExpandedPrompt, find_media_positions
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.server.prompts.sampling_params import RequestLimits, SamplingDefaults
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.routes.state_builder import make_state
from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds
from trencadis.server.text.chat_template import ChatTemplate
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

MAX_MODEL_LEN = 1024


def join_deltas(engine: ScriptedEngine, count: int) -> None:
    """Lets each delta of a choice have ``count`` tokens, the last one fewer, as steps that accept drafts make them."""
    single = engine._deltas

    async def joined(request: Request) -> AsyncIterator[Delta]:
        kept: dict[int, Delta] = {}
        async for delta in single(request):
            before = kept.pop(delta.choice, None)
            if before is not None:
                delta.tokens = before.tokens + delta.tokens
                delta.prompt_logprobs = before.prompt_logprobs or delta.prompt_logprobs
                if before.logprobs is not None:
                    delta.logprobs = before.logprobs + (delta.logprobs or [])
            if delta.finish is None and len(delta.tokens) < count:
                kept[delta.choice] = delta
            else:
                yield delta

    engine._deltas = joined  # type: ignore[method-assign]


class ScriptedEngine:
    """Answers every request with ``answer`` (ids), one token a delta, ended by ``eos``."""

    def __init__(self, answer: Sequence[int], eos: int) -> None:
        self.answer = list(answer)
        self.eos = eos
        self.observers: list[Callable[[EngineStats], None]] = []
        self.info: EngineInfo | None = EngineInfo("cpu", "float32", MAX_MODEL_LEN, 16, 100, 1000, 64)
        self.phase, self.accepting, self.healthy, self.ready = "running", True, True, True
        self.restarts = 0
        self.failing = False
        self.sleep_level, self.sleep_operation = 0, ""
        self.on_operation: list[Callable[[str, float], None]] = []
        self.stats = EngineStats()
        self.plan: GraphPlan | None = None
        self.progress: Phase | None = None
        self.submitted: list[tuple[Request, list[Any]]] = []
        self.aborted: list[tuple[str, int]] = []
        self.resets: list[str] = []
        self.delay = 0.0
        self.hold: threading.Event | None = None
        self.refuse: TrencadisError | None = None
        self.fail_at: int | None = None
        self.break_at: int | None = None

    def submit(self, request: Request, pixels: Sequence[Any]) -> AsyncIterator[Delta]:
        if self.refuse is not None:
            raise self.refuse
        frame(Add(request))  # as the real client does; it cannot send everything that Python can hold
        self.submitted.append((request, list(pixels)))
        return self._deltas(request)

    def abort(self, id: str, choice: int = -1) -> None:
        self.aborted.append((id, choice))

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        pass  # its deltas come from the iterator itself

    async def sleep(self, level: int = 1, abort: bool = False) -> None:
        self.sleep_level = level
        self.resets.append(f"sleep {level} {abort}")
        for observer in self.on_operation:
            observer("sleep", 0.5)

    async def wake(self) -> None:
        self.sleep_level = 0

    def reset_prefix_cache(self) -> None:
        self.resets.append("prefix")

    def reset_encoder_cache(self) -> None:
        self.resets.append("encoder")

    async def learn_buckets(self, force: bool = False) -> None:
        self.resets.append(f"learn {force}")

    async def _deltas(self, request: Request) -> AsyncIterator[Delta]:
        p = request.params
        limit = MAX_MODEL_LEN if p.max_tokens is None else p.max_tokens
        answer = (self.answer * 1000 if p.ignore_eos else [*self.answer, self.eos])[:limit]
        prompt = None
        if p.prompt_logprobs is not None:
            prompt = [None, *(self._logprob(t, p.prompt_logprobs) for t in request.tokens[1:])]
        if not answer:
            yield Delta(request.id, finish="length", prompt_logprobs=prompt)
        while self.hold is not None and not self.hold.is_set():
            await asyncio.sleep(0.002)
        for i, token in enumerate(answer):
            await asyncio.sleep(self.delay)
            if self.break_at == i:
                raise RuntimeError("a mistake of ours")
            for choice in range(p.n):
                if (request.id, choice) in self.aborted or (request.id, -1) in self.aborted:
                    continue
                if self.fail_at == i:
                    yield Delta(request.id, choice, finish="error", status=503, message="The engine stopped.")
                    return
                last = i == len(answer) - 1
                ended = token in p.stop_token_ids
                finish = "stop" if ended or token == self.eos else "length" if last else None
                yield Delta(
                    request.id, choice, [token],
                    logprobs=self._logprobs(token, p) if p.reports else None,
                    prompt_logprobs=prompt if i == 0 and choice == 0 else None,
                    finish=finish, stop_token=token if ended else None, cached_tokens=3,
                    stats=RequestStats(0.1, 0.2, 0.3) if finish else None,
                )  # fmt: skip
                if ended:
                    return

    def _logprobs(self, token: int, params: SamplingParams) -> list[TokenLogprob]:
        ids = params.logprob_token_ids
        if ids is None:
            return [self._logprob(token, params.logprobs or 0)]
        return [TokenLogprob(token, -0.5, 1, ids, [-float(i) for i in ids], [*range(2, 2 + len(ids))])]

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        ids = [token, *range(300, 400), *range(100)][:top]
        ids += range(500, 500 + top - len(ids))
        return TokenLogprob(token, -0.5, 1, ids, [-0.5 - i if i < 3 else float("-inf") for i in range(len(ids))])


@dataclass
class FakeImage:
    """An image of two by three merged cells."""

    source: Any
    pixels: Any = field(default_factory=lambda: np.zeros((24, 1176), np.uint8))
    grid: tuple[int, int, int] = (1, 4, 6)
    tokens: int = 6
    slots: int = 64
    digest: str = "d"
    resized: tuple[int, int] = (56, 84)
    original: tuple[int, int] = (60, 90)


class FakeImages:
    """Takes every source but those that contain ``bad``."""

    def __init__(self) -> None:
        self.parts: list[MediaPart] = []
        self.cache = ProcessorCache(0)
        self.scope = MediaScope()
        self.status = 0

    @property
    def received(self) -> list[tuple[Any, str]]:
        return [(p.source, p.path) for p in self.parts]

    async def prepare(self, parts: Sequence[MediaPart], scope: MediaScope) -> list[FakeImage]:
        self.parts += parts
        self.scope = scope
        for part in parts:
            if "bad" in str(part.source):
                raise BadRequest("The image cannot be decoded.", param=part.path)
            if self.status:
                raise from_status(self.status, "As told.", part.path)
            scope.charge(56 * 84)
        return [FakeImage(p.source) for p in parts]


@dataclass
class ScriptedApp:
    """An application and its parts; ``call`` makes one request."""

    engine: ScriptedEngine
    service: TextService
    images: FakeImages
    tokenizer: Tokenizer
    made: FastAPI | None = None

    def app(self, bounds: Bounds | None = None, **given: Any) -> FastAPI:
        """``given``: flags of the server, and fields of HttpSettings; ``bounds``: as the flags that set them."""
        flags: dict[str, Any] = {"served_model_name": ["m", "alias"]}
        if bounds is not None:
            flags |= {"max_num_queued_reqs": bounds.requests, "max_num_queued_tokens": bounds.tokens}
            flags |= {"max_num_queued_pixels": bounds.pixels, "max_queued_body_bytes": bounds.body_bytes}
        beside = {f.name: given.pop(f.name) for f in fields(HttpSettings) if f.name in given}
        settings = HttpSettings(ServerConfig(**{**flags, **given}), **beside)
        self.made = create_app(make_state(settings, self.engine, self.service))
        state = self.made.state.trencadis
        state.grammar_cache.pool = trials()
        return self.made

    def call(self, path: str, body: Any = None, method: str = "", **kwargs: Any) -> httpx.Response:
        app = self.made or self.app()
        if body is not None:
            kwargs["json"] = body

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method or ("GET" if body is None else "POST"), path, **kwargs)

        response = asyncio.run(run())
        check_declared(app, response)
        return response

    def chat(self, content: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.call("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.call("/v1/completions", {"prompt": prompt, **fields})

    def events(self, response: httpx.Response) -> list[Any]:
        """The events' objects; checks the form and the closing [DONE]."""
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines[-1] == "" and lines[-2] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line[6:]) for line in lines[:-2]]


@cache
def trials() -> WorkerPool:
    """Tries the grammars of all applications here; a worker takes half a second to start."""
    return WorkerPool(1, jobs=JOBS)


def scripted_app(checkpoint: Path) -> ScriptedApp:
    """A scripted engine, a service over the checkpoint's tokenizer, and the application over both."""
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    template = ChatTemplate.from_checkpoint(checkpoint, tokenizer)

    def token(text: str) -> int:
        found = tokenizer.find_token_id(text)
        assert found is not None
        return found

    text = TextConfig(64, 2, 4, 2, 16, 128, 1000, 1e-6, 1e6, MAX_MODEL_LEN, True, True, (2, 3, 3))
    config = ModelConfig(
        checkpoint, "Qwen2_5_VLForConditionalGeneration", text, VisionConfig(2, 32, 2, 64, 64, (1,)), "float32",
        (token("<|im_end|>"),), token("<|image_pad|>"), token("<|video_pad|>"),
        token("<|vision_start|>"), token("<|vision_end|>"),
    )  # fmt: skip

    def join(tokens: Sequence[int], all_images: Sequence[Any]) -> ExpandedPrompt:
        places = find_media_positions(tokens, config.image_token, config.video_token, all_images)
        out: list[int] = []
        spans = []
        for i, t in enumerate(tokens):
            if i in places:
                spans.append(MediaSpan(len(out), 6, "d", (1, 4, 6), 64))
            out += [t] * 6 if i in places else [t]
        return ExpandedPrompt(out, spans, b"p", -2)

    images = FakeImages()
    service = TextService(
        config,
        tokenizer,
        template,
        SamplingDefaults(),
        RequestLimits(1000, max_images=2, max_choices=8),
        cast(Any, images),
        cast(Any, join),
    )
    answer = tokenizer.encode("Hello wörld, 日本!")
    return ScriptedApp(ScriptedEngine(answer, config.eos[0]), service, images, tokenizer)
