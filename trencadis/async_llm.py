"""``AsyncLLM``: the engine in a separate process, as in the server, for callers with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

from trencadis.core.errors import BadRequest, StartupError, Unavailable
from trencadis.core.executor.engine_process_launcher import spawn_engine
from trencadis.core.json_types import JsonMapping
from trencadis.core.process import engine_messages
from trencadis.engine_args import AsyncEngineArgs, build_offline_setup
from trencadis.metrics_reader import MetricValue, make_metrics, read_metrics
from trencadis.offline_adapters import LoRARequest, OfflineAdapters
from trencadis.offline_beam_search import GenerationParams, engine_params
from trencadis.offline_tokenizer import OfflineTokenizer
from trencadis.outputs import OutputBuilder, PoolingOutput, PoolingRequestOutput, RequestOutput
from trencadis.prompt_inputs import PromptType, check_priority, read_prompt
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.prompts import media_frontends
from trencadis.server.prompts.answer_grammar import add_sampling_rule, apply_structured_outputs
from trencadis.server.prompts.generation_stream import Generation
from trencadis.server.prompts.pooling_prompts import make_pooling_request, run_pooling
from trencadis.server.protocol.pooler_output import finish_pooled
from trencadis.server.protocol.pooling_params import PoolingParams
from trencadis.unsupported_vllm_names import UnsupportedMethods, raise_unsupported, refuse_tokenization_kwargs

log = logging.getLogger("trencadis.llm")
POLL_SECONDS = 1.0


class AsyncLLM(UnsupportedMethods):
    """Serves many requests concurrently, all on one event loop. The constructor returns while the engine is still
    loading.

    Args:
        model: checkpoint folder or hub id; "": the bundled demo.
        options: the options of ``LLM``.

    Raises:
        StartupError: one line that names the invalid or unsupported option; errors that the engine itself finds are
            raised by the first request.
    """

    def __init__(self, model: str | Path = "", **options: Any) -> None:
        self._log_requests = bool(options.pop("enable_log_requests", None))
        made = build_offline_setup(model, options)
        self.config = made.config
        handle = spawn_engine(self.config)
        try:
            self.service = made.service()
        except BaseException:
            handle.kill()
            raise
        self._grammars = GrammarCache(self.service.tokenizer, self.service.config.text.vocab, self.service.eos)
        self._supervisor = Supervisor(
            self.config, handle, on_fatal=self._on_fatal, vocabulary=self._grammars.pack_vocabulary
        )
        self._supervisor.on_info.append(self._on_engine_info)
        self._metrics = make_metrics(Path(self.config.model).name, self.service, self._supervisor)
        self._tokenizer = OfflineTokenizer(self.service)
        self._adapters = OfflineAdapters(self.service.config, self.config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._startup_done = asyncio.Event()
        """Set once the engine accepts requests or has failed to start."""
        self._failure = ""
        self._open_ids: set[str] = set()
        self._closed = False

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, *unused: object, **more: object) -> Self:
        """Creates an engine with these options; vLLM's other arguments are ignored."""
        return cls(engine_args.model, **engine_args.options())

    # Requests

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: GenerationParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: JsonMapping | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields outputs as they arrive, until the request has ended. Closing the generator, or cancelling its task,
        aborts the request.

        Raises:
            BadRequest: the prompt or a parameter is at fault, or the id is in use.
            StartupError: the engine could not start.
            Unavailable: the engine stopped; it is being restarted.
        """
        refuse_tokenization_kwargs(tokenization_kwargs)
        if data_parallel_rank:
            raise_unsupported("data_parallel_rank", "data parallelism")
        check_priority(priority, self.config.scheduling_policy)
        async with self._register_request(request_id):
            params, beams = engine_params(sampling_params, self.service)
            made = await read_prompt(self.service, prompt, params)
            params = await apply_structured_outputs(self._grammars, self.service, made, params)
            add_sampling_rule(self.service, made, params)
            request = made.make_request(request_id, params, arrival=time.time(), priority=priority)
            request.beams, request.adapter = beams, self._adapters.find(lora_request)
            if self._log_requests:
                log.info("request %s: %d prompt tokens, %s", request_id, len(made.tokens), params)
            generation = Generation(self._supervisor, self.service, request, made, self._metrics.record_finished)
            answer = OutputBuilder(request, made, generation.streams, self.service.tokenizer)
            async with aclosing(generation.stream_pieces()) as pieces:
                async for choice, piece in pieces:
                    answer.add_piece(choice, piece)
                    output = answer.take_output()
                    if output is not None:
                        yield output

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: JsonMapping | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput]]:
        """Yields the one output of a pooling request: an embedding or probabilities.

        Raises:
            BadRequest: the engine generates, the prompt or a parameter is at fault, or the id is in use.
        """
        refuse_tokenization_kwargs(tokenization_kwargs)
        pooling = self.service.config.pooling
        if pooling is None:
            raise BadRequest('AsyncLLM.encode needs an engine made with runner="pooling".')
        pooling_params.check(pooling, self.service.config.text.hidden)
        check_priority(priority, self.config.scheduling_policy)
        async with self._register_request(request_id):
            made = await read_prompt(self.service, prompt, pooling_params)
            request = make_pooling_request(
                request_id, made, pooling, pooling_params, arrival=time.time(), priority=priority
            )
            request.adapter = self._adapters.find(lora_request)
            generation = Generation(self._supervisor, self.service, request, made, self._metrics.record_finished)
            (raw,) = await run_pooling([generation], pooling, pooling_params)
            output = PoolingOutput(finish_pooled(raw, pooling, pooling_params))
            yield PoolingRequestOutput(request_id, output, made.tokens, generation.timing.cached)

    @contextlib.asynccontextmanager
    async def _register_request(self, request_id: str) -> AsyncGenerator[None]:
        """Reserves a request id while the block runs; waits until the engine is up first."""
        if request_id in self._open_ids:
            raise BadRequest(f"request id {request_id!r} is in use.", param="request_id")
        self._open_ids.add(request_id)
        try:
            await self._wait_until_up()
            yield
        finally:
            self._open_ids.discard(request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Aborts requests: their outputs end with ``finish_reason`` ``abort``."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            self._supervisor.abort(one)

    # The engine

    async def check_health(self) -> None:
        """Waits until the engine is up.

        Raises:
            StartupError: it could not start.
            Unavailable: it stopped.
        """
        await self._wait_until_up()
        if not self._supervisor.healthy:
            raise Unavailable(f"The engine is not accepting requests ({self._supervisor.phase}).", retry_after=5)

    async def reset_prefix_cache(self, *unused: object, **more: object) -> bool:
        """Empties the prefix cache; always True."""
        await self._wait_until_up()
        self._supervisor.reset_prefix_cache()
        return True

    async def get_tokenizer(self) -> OfflineTokenizer:
        """Returns the tokenizer: ``encode``, ``decode``, a call, ``apply_chat_template``, ``eos_token_id``."""
        return self._tokenizer

    @property
    def tokenizer(self) -> OfflineTokenizer:
        """The tokenizer, as ``get_tokenizer`` returns it, without awaiting."""
        return self._tokenizer

    def get_metrics(self) -> list[MetricValue]:
        """Returns the server's ``vllm:`` metrics of this engine: counters, gauges and histograms."""
        return read_metrics(self._metrics)

    @property
    def is_running(self) -> bool:
        """True if requests are accepted, or will be once the engine is up."""
        return not self._closed and not self._failure

    @property
    def is_stopped(self) -> bool:
        """True if it was shut down or could not start."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """True if the engine could not start, or has stopped accepting requests."""
        return bool(self._failure) or (self._supervisor.last_info is not None and not self._supervisor.accepting)

    def shutdown(self, timeout: float | None = None) -> None:
        """Kills the engine's process and the decode workers at once; running requests end with an error."""
        if self._closed:
            return
        self._closed = True
        supervisor = self._supervisor
        supervisor.draining = supervisor.stopping = True
        process = supervisor.link.handle.process
        process.kill()
        process.wait()
        if supervisor.task is None:
            supervisor.link.handle.kill()
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(supervisor.task.cancel)
        media_frontends.close_frontends(self.service)
        self._grammars.close()

    async def __aenter__(self) -> Self:
        await self._wait_until_up()
        return self

    async def __aexit__(self, *why: object) -> None:
        self.shutdown()
        if self._supervisor.task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor.task

    async def _wait_until_up(self) -> None:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise Unavailable("This AsyncLLM was shut down.")
        if self._loop is None:
            self._loop = loop
            self._supervisor.start()
        elif self._loop is not loop:
            raise BadRequest("An AsyncLLM belongs to the event loop of its first request; make one in each loop.")
        while not self._startup_done.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._startup_done.wait(), POLL_SECONDS)
            if self._supervisor.failing:
                self._on_fatal("the engine ended again and again while it loaded", 1)
        if self._failure:
            raise StartupError(self._failure)

    def _on_fatal(self, message: str, code: int) -> None:
        self._failure = message
        self._startup_done.set()

    def _on_engine_info(self, info: engine_messages.EngineInfo) -> None:
        self.service.max_model_len = info.max_model_len
        self._startup_done.set()


AsyncLLMEngine = AsyncLLM
"""An older name of vLLM's."""
