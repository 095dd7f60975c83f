"""``LLMEngine``: the engine in this process, stepped by its caller, and a progress bar; ``LLM`` is built on both."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, TrencadisError, Unavailable, from_status
from trencadis.core.json_types import JsonMapping
from trencadis.core.links.rank_placement import choose_executor_backend, topology
from trencadis.core.process import torch_detection
from trencadis.core.request import AdapterRef, Delta, Request, SamplingParams
from trencadis.core.startup_progress_and_warmup_pacing import Progress
from trencadis.engine_args import EngineArgs, OfflineSetup, build_offline_setup
from trencadis.offline_adapters import LoRARequest, OfflineAdapters
from trencadis.offline_beam_search import EngineParams, GenerationParams, engine_params
from trencadis.offline_tokenizer import OfflineTokenizer
from trencadis.outputs import OutputBuilder, RequestOutput
from trencadis.prompt_inputs import PromptType, check_priority, read_prompt
from trencadis.server.engine.engine_client_and_request_timing import RequestTiming
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.prompts import media_frontends
from trencadis.server.prompts.answer_grammar import add_sampling_rule, apply_structured_outputs
from trencadis.server.prompts.generation_stream import start_timing
from trencadis.server.prompts.output_processor import ChoiceStream
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.unsupported_vllm_names import UnsupportedFeature, UnsupportedMethods, refuse_tokenization_kwargs

if TYPE_CHECKING:
    from trencadis.core.engine.engine import Engine
    from trencadis.metrics_reader import LocalMetrics, MetricValue

log = logging.getLogger("trencadis.engine")

T = TypeVar("T")
OBSERVE_EVERY = 1024
"""Number of steps after which the metrics are updated from the engine's statistics."""


def _start_engine(config: EngineConfig, progress: Progress | None) -> Engine:
    """Creates the engine; imports torch here, after the device's environment variables are set.

    A process that torchrun started for another rank runs that rank here until the engine ends, and then exits.
    """
    config, line = choose_executor_backend(config, os.environ)
    if line:
        log.warning("%s", line)
    rank_topology = topology(config, os.environ)
    if not rank_topology.leads:
        from trencadis.core.executor.headless_ranks import run_headless

        raise SystemExit(run_headless(config, rank_topology, os.environ, again=False))
    for line in torch_detection.prepare_device_env(config.device, world=rank_topology.here).lines:
        log.info("%s", line)
    torch_detection.import_torch()
    from trencadis.core.engine.engine_builder import create_engine

    return create_engine(config, progress)


@dataclass(slots=True)
class OfflineRequest:
    """A request that has not ended; ``timing`` is for the metrics, None without them."""

    streams: list[ChoiceStream]
    answer: OutputBuilder
    pixels: Sequence[NDArray[np.uint8]]
    timing: RequestTiming | None = None


class LLMEngine(UnsupportedMethods):
    """An engine that takes requests by ``add_request``; each ``step`` runs the model once and returns new outputs.

    Args:
        made: configuration, media rules and template (``llm_kwargs.build_offline_setup``); ``from_engine_args`` builds
            them.
        progress: called with each phase of startup.

    Raises:
        StartupError: one line that names the invalid or unsupported option.
    """

    def __init__(self, made: OfflineSetup, progress: Progress | None = None) -> None:
        self.config = made.config
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="llm-io").start()
        self.engine = _start_engine(self.config, progress)
        self.service = made.service()
        self.service.max_model_len = self.engine.info().max_model_len
        self.tokenizer = OfflineTokenizer(self.service)
        self.adapters = OfflineAdapters(self.service.config, self.config)
        self._grammars = GrammarCache(self.service.tokenizer, self.service.config.text.vocab, self.service.eos)
        self._vocabulary_sent = False
        self._metrics = self._make_metrics()
        self._requests: dict[str, OfflineRequest] = {}
        self._pending_outputs: list[RequestOutput] = []
        self._steps = 0
        self._closed = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *unused: object, **more: object) -> Self:
        """Creates an engine with these options; vLLM's other arguments are ignored."""
        return cls(build_offline_setup(engine_args.model, engine_args.options()))

    def _make_metrics(self) -> LocalMetrics | None:
        """Creates the metrics; returns None if the server's packages are not installed."""
        try:
            from trencadis.metrics_reader import LocalMetrics
        except ModuleNotFoundError:
            return None
        return LocalMetrics(Path(self.config.model).name, self.service, self.engine.info(), self.engine.stats)

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: GenerationParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: JsonMapping | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> None:
        """Adds a request for a prompt in a form that ``LLM.generate`` accepts; ``step`` returns its outputs.

        Raises:
            BadRequest: the prompt or a parameter is at fault, or the id is in use.
        """
        adapter = self.adapters.find(lora_request)
        refuse_tokenization_kwargs(tokenization_kwargs)
        given = engine_params(params or self.default_params(), self.service)
        made = self.wait(read_prompt(self.service, prompt, given.sampling))
        self.submit(request_id, made, given, priority, arrival_time, adapter)

    def submit(
        self, request_id: str, prompt: Prompt, given: EngineParams, priority: int = 0, arrival: float | None = None,
        adapter: AdapterRef | None = None,
    ) -> None:  # fmt: skip
        """Queues a prompt that is tokenized and whose media are prepared."""
        if request_id in self._requests:
            raise BadRequest(f"request id {request_id!r} is in use.", param="request_id")
        check_priority(priority, self.config.scheduling_policy)
        if self.service.config.pooling is not None:
            raise BadRequest('This engine pools; make one with runner="generate" for answers.')
        params = self._constrain(prompt, given.sampling)
        add_sampling_rule(self.service, prompt, params)
        request = prompt.make_request(request_id, params, arrival=arrival or time.time(), priority=priority)
        request.beams, request.adapter = given.beams, adapter
        self.submit_request(request, prompt)

    def submit_request(self, request: Request, prompt: Prompt) -> None:
        """Queues a request, which may be a pooling request."""
        request_id, params = request.id, request.params
        request.arrival = request.arrival or time.time()
        streams = [self.service.make_stream(params, prompt) for _ in range(params.n)]
        answer = OutputBuilder(request, prompt, streams, self.service.tokenizer)
        timing = None if self._metrics is None else start_timing(request, prompt, streams)
        self._requests[request_id] = OfflineRequest(streams, answer, prompt.pixels, timing)
        self.engine.add(request)

    def _constrain(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """Attaches the grammar of the answer to a prompt and returns the parameters without it.

        Sends the vocabulary to the engine before the first grammar.
        """
        if params.structured_outputs is None and params.guided_decoding is None:
            return params
        plain: SamplingParams = self.wait(apply_structured_outputs(self._grammars, self.service, prompt, params))
        if not self._vocabulary_sent:
            self.engine.set_vocabulary(self.wait(self._grammars.pack_vocabulary()))
            self._vocabulary_sent = True
        return plain

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Aborts requests; unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            entry = self._requests.pop(request_id, None)
            if entry is not None:
                self.engine.abort(request_id)
                self._record_end(entry, "abort")

    def has_unfinished_requests(self) -> bool:
        """Returns True if ``step`` may return more outputs."""
        return bool(self._requests or self._pending_outputs)

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self._requests)

    # Steps

    def step(self) -> list[RequestOutput]:
        """Runs the model once and returns the new outputs.

        Raises:
            TrencadisError: a request failed; it has been removed, and the others continue with the next step.
        """
        self._pending_outputs += self._step_engine()
        made, self._pending_outputs = self._pending_outputs, []
        return made

    def step_for(self, ids: Collection[str]) -> list[RequestOutput]:
        """Runs ``step`` and returns the outputs of the requests ``ids``.

        Those of other requests are kept for the next call.
        """
        made = self.step()
        self._pending_outputs = [o for o in made if o.request_id not in ids]
        return [o for o in made if o.request_id in ids]

    def run_to_end(self, submitted: Iterable[str], count: int, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Runs requests until they have ended and returns their last outputs, in order; all end if one fails.

        Args:
            submitted: submits ``count`` requests while it yields their ids.
            use_tqdm: see ``PromptProgressBar``.
        """
        bar = PromptProgressBar(count, use_tqdm)
        done: dict[str, RequestOutput | None] = {}
        try:
            for request_id in submitted:
                done[request_id] = None
            left = len(done)
            while left:
                for output in self.step_for(done):
                    done[output.request_id] = output
                    left -= 1
                    bar.step(output)
        finally:
            bar.close()
            self.abort_request([i for i, output in done.items() if output is None])
            self.drain()
        return [output for output in done.values() if output is not None]

    def _step_engine(self) -> list[RequestOutput]:
        touched: dict[str, OfflineRequest] = {}
        failed: TrencadisError | None = None
        for delta in self.engine.step():
            entry = self._requests.get(delta.id)
            if entry is None:
                continue
            if delta.finish == "error":
                failed = failed or from_status(delta.status or 500, delta.message)
                self._drop_failed(delta.id)
                touched.pop(delta.id, None)
                continue
            self._apply_delta(entry, delta)
            touched[delta.id] = entry
        for request_id, index in self.engine.needs():
            if request_id in self._requests:
                self.engine.add_media(request_id, index, self._requests[request_id].pixels[index])
        made = [output for entry in touched.values() if (output := entry.answer.take_output()) is not None]
        for output in made:
            if output.finished:
                self._record_end(self._requests.pop(output.request_id))
        self._count_step()
        if failed is not None:
            self._pending_outputs += made
            raise failed
        return made

    def _apply_delta(self, entry: OfflineRequest, delta: Delta) -> None:
        stream, timing = entry.streams[delta.choice], entry.timing
        if stream.finish_reason is not None:
            return  # tokens in flight when a stop string ended it
        piece = stream.feed(delta)
        entry.answer.add_piece(delta.choice, piece)
        if timing is not None:
            timing.add_tokens(delta.choice, len(delta.tokens))
            timing.finish += [piece.finish_reason] if piece.finish_reason is not None else []
        if stream.stopped_early and delta.finish is None:
            self.engine.abort(delta.id, delta.choice)

    def _drop_failed(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._record_end(self._requests.pop(request_id), "error")

    def _record_end(self, entry: OfflineRequest, reason: str = "") -> None:
        if self._metrics is not None and entry.timing is not None:
            self._metrics.record_end(entry.timing, reason)

    def _count_step(self) -> None:
        self._steps += 1
        if self._metrics is not None and self._steps % OBSERVE_EVERY == 0:
            self._metrics.refresh()

    def drain(self) -> None:
        """Steps until no work of ended requests is in flight; does nothing while a request is open."""
        if self._requests:
            return
        while not self.engine.idle():
            self.engine.step()
        self.engine.step()

    # The rest

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` on the event loop that fetches and decodes media, and returns its result.

        Raises:
            Unavailable: the engine is closed, and its event loop has stopped.
        """
        if self._closed:
            work.close()
            raise Unavailable("This engine was closed; make another one.")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def default_params(self) -> SamplingParams:
        """Returns the parameters of a ``generate`` call without any: the checkpoint's sampling defaults."""
        v = self.service.defaults.values
        return SamplingParams(
            temperature=v["temperature"],
            top_p=v["top_p"],
            top_k=int(v["top_k"]),
            min_p=v["min_p"],
            repetition_penalty=v["repetition_penalty"],
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the checkpoint's defaults, lengths included, for the caller to modify."""
        defaults, made = self.service.defaults, self.default_params()
        most = made.max_tokens if defaults.max_tokens is None else defaults.max_tokens
        return replace(made, max_tokens=most, min_tokens=min(defaults.min_tokens, most or defaults.min_tokens))

    def get_tokenizer(self) -> OfflineTokenizer:
        """Returns the tokenizer."""
        return self.tokenizer

    def get_metrics(self) -> list[MetricValue]:
        """Returns the server's ``vllm:`` metrics of this engine.

        Raises:
            UnsupportedFeature: the packages of the server are not installed.
        """
        if self._metrics is None:
            raise UnsupportedFeature("get_metrics needs the packages prometheus-client and msgspec.")
        return self._metrics.values()

    def reset_prefix_cache(self, *unused: object, **more: object) -> bool:
        """Empties the prefix cache; always returns True."""
        self.engine.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Frees the engine; shuts down its threads and the decode workers."""
        if self._closed:
            return
        self._closed = True
        self.engine.close()
        media_frontends.close_frontends(self.service)
        self._grammars.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()


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
