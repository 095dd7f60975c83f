"""Offline use: the engine in this process, prompts in, answers out.

from trencadis import LLM, SamplingParams
llm = LLM(model="path/or/hub-id")
print(llm.chat([{"role": "user", "content": "Who are you?"}])[0].outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trencadis.core.engine.engine import Engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonMapping
from trencadis.core.request import AdapterRef, SamplingParams
from trencadis.core.startup_progress_and_warmup_pacing import Progress
from trencadis.engine_args import EngineArgs, build_offline_setup, read_template
from trencadis.llm_engine import LLMEngine, UseTqdm
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import media_scope
from trencadis.multimodal.media_timing_and_concurrency import gather_or_cancel
from trencadis.offline_adapters import LoRARequests
from trencadis.offline_beam_search import (
    BeamSearchOutput,
    BeamSearchParams,
    EngineParams,
    GenerationParams,
    engine_params,
    final_output_only,
    make_beam_output,
)
from trencadis.offline_tokenizer import OfflineTokenizer
from trencadis.outputs import CompletionOutput as CompletionOutput
from trencadis.outputs import RequestOutput as RequestOutput
from trencadis.pooling_methods import PoolingMethods
from trencadis.prompt_inputs import PromptType, as_list, read_prompt
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.prompts.prompt_builder import TextService
from trencadis.unsupported_vllm_names import UnsupportedMethods

if TYPE_CHECKING:
    import torch

    from trencadis.metrics_reader import MetricValue

Params = GenerationParams | Sequence[GenerationParams] | None
Message = Mapping[str, object]


class LLM(PoolingMethods, UnsupportedMethods):
    """The engine, its tokenizer and its image processor in one process; ``with LLM(...) as llm`` closes it.

    Args:
        model: checkpoint folder or hub id; "": the bundled demo.
        allowed_local_media_path: folder from which ``file:`` URLs may read. Bare paths (``{"type": "image", "image":
            "a.png"}``) may name any file.
        allowed_media_domains: hosts from which media may be fetched; empty: every public host.
        chat_template: a Jinja file, or the template itself; None: the model's.
        chat_template_content_format: ``auto``, ``string`` or ``openai``.
        progress: called with each phase of startup.
        options: every other flag of ``serve`` that concerns the engine. Strings are parsed as on the command line
            (``kv_cache_memory_bytes="256MiB"``), None is the default, and flags that the command line accepts without
            effect (``task="generate"``) are accepted here too.

    Raises:
        StartupError: one line that names the invalid or unsupported option.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        tokenizer: str | Path | None = None,
        trust_remote_code: bool | None = None,
        allowed_local_media_path: str | Path | None = None,
        allowed_media_domains: Sequence[str] | None = None,
        tensor_parallel_size: int | None = None,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        seed: int | None = None,
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool | None = None,
        hf_token: bool | str | None = None,
        limit_mm_per_prompt: JsonMapping | str | None = None,
        mm_processor_kwargs: JsonMapping | str | None = None,
        max_model_len: int | str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | str | None = None,
        kv_cache_memory_bytes: int | str | None = None,
        enable_prefix_caching: bool | None = None,
        device: str | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        named = dict(
            tokenizer=tokenizer, trust_remote_code=trust_remote_code, chat_template=chat_template,
            allowed_local_media_path=allowed_local_media_path, allowed_media_domains=allowed_media_domains,
            tensor_parallel_size=tensor_parallel_size, dtype=dtype, revision=revision, seed=seed,
            gpu_memory_utilization=gpu_memory_utilization, enforce_eager=enforce_eager, hf_token=hf_token,
            limit_mm_per_prompt=limit_mm_per_prompt, mm_processor_kwargs=mm_processor_kwargs,
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes, enable_prefix_caching=enable_prefix_caching, device=device,
            chat_template_content_format=chat_template_content_format,
        )  # fmt: skip
        self.llm_engine = LLMEngine(build_offline_setup(model, named | options), progress)
        self._request_numbers = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Creates an ``LLM`` with these options."""
        return cls(engine_args.model, **engine_args.options())

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine."""
        return self.llm_engine.config

    @property
    def engine(self) -> Engine:
        """The engine itself."""
        return self.llm_engine.engine

    @property
    def service(self) -> TextService:
        """Text service, which builds prompts and detokenizes answers."""
        return self.llm_engine.service

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates continuations of raw prompts: strings, token ids, ``{"prompt": ..., "multi_modal_data": {"image":
        one or a list, "video": ...}}``, or a list of these. A prompt holds one placeholder per image
        (``<|image_pad|>``) and video (``<|video_pad|>``). An image is a path, URL, file's bytes, PIL image, or an array
        of numpy or torch: [height, width, channels] or [channels, height, width] with 3 or 4 channels, uint8 or floats
        between 0 and 1. A video is a path, URL, file's bytes, array with one axis more or list of frames; several are a
        list of lists or arrays. A prompt object may also have ``mm_processor_kwargs`` (fps, max_pixels ...; for all its
        media), ``multi_modal_uuids`` (``{"image": one or a list}``) and ``cache_salt``.

        Args:
            sampling_params: one value for all prompts, or one per prompt; ``BeamSearchParams`` select beam search.
            use_tqdm: True shows a progress bar for more than one prompt; a callable creates it instead of tqdm.
            lora_request: the adapter that answers, one for all prompts or one for each.
            priority: priority of each prompt, lower first, with ``scheduling_policy="priority"``.

        Raises:
            BadRequest: a prompt or a parameter is at fault.
        """
        items = as_list(prompts)
        adapters = self.llm_engine.adapters.find_all(lora_request, len(items))
        params = self._engine_params(sampling_params, len(items))
        if priority is not None and len(priority) != len(items):
            raise BadRequest(f"{len(items)} prompts came with {len(priority)} priorities.", param="priority")
        return self._run(self._read_prompts(items, params), params, use_tqdm, priority, adapters)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Returns the best continuations of each prompt; prompts are those of ``generate``, with images too.

        Args:
            concurrency_limit: maximum number of prompts that run at a time; None: as many as fit in the engine.

        Raises:
            BadRequest: a prompt or a parameter is at fault.
        """
        items = as_list(prompts)
        adapters = self.llm_engine.adapters.find_all(lora_request, len(items))
        given = [engine_params(params, self.service)] * len(items)
        size = concurrency_limit or max(len(items), 1)
        found: list[BeamSearchOutput] = []
        for at in range(0, len(items), size):
            part = items[at : at + size]
            those = slice(at, at + size)
            made = self._read_prompts(part, given[those])
            outputs = self._run(made, given[those], use_tqdm, adapters=adapters[those])
            found += [
                make_beam_output(output, prompt, self.service, params.include_stop_str_in_output)
                for output, prompt in zip(outputs, part, strict=True)
            ]
        return found

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[JsonMapping] | None = None,
        chat_template_kwargs: JsonMapping | None = None,
        mm_processor_kwargs: JsonMapping | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them. Content parts are OpenAI's or qwen-vl-utils': ``{"type": "image",
        "image": path, URL, PIL image, array or bytes, "max_pixels": ...}``, ``{"type": "video", "video": path, URL,
        bytes, array or list of frames, "fps": ...}``. Arrays are numpy's or torch's, as in ``generate``.

        Args:
            use_tqdm: as in ``generate``.
            chat_template: a Jinja file, or the template itself, instead of the model's.
            tools: passed to the template; tool calls are returned as text.
            mm_processor_kwargs: min_pixels, max_pixels of every image, within the limits with which the LLM was
                created.
            cache_salt: KV blocks and images are shared only between requests with equal salts.

        Raises:
            BadRequest: a message or a parameter is at fault.
        """
        self._check_format(chat_template_content_format)
        scope = media_scope(cache_salt, mm_processor_kwargs)
        template = read_template(chat_template)
        conversations: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        adapters = self.llm_engine.adapters.find_all(lora_request, len(conversations))
        given = None if sampling_params is None else self._engine_params(sampling_params, len(conversations))
        made = self._wait(
            gather_or_cancel(
                self.service.make_chat_prompt(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    kwargs=chat_template_kwargs,
                    chat_template=template,
                    truncate=None if given is None else given[i].sampling.truncate_prompt_tokens,
                    scope=scope,
                )
                for i, conversation in enumerate(conversations)
            )
        )
        params = given or [EngineParams(self._chat_defaults(len(p.tokens))) for p in made]
        return self._run(made, params, use_tqdm, adapters=adapters)

    def get_tokenizer(self) -> OfflineTokenizer:
        """Returns the tokenizer: ``encode``, ``decode``, a call, ``apply_chat_template``, ``eos_token_id``."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the checkpoint's defaults (``generation_config.json``), for the caller to modify."""
        return self.llm_engine.get_default_sampling_params()

    def get_metrics(self) -> list[MetricValue]:
        """Returns the server's ``vllm:`` metrics of this engine: counters, gauges and histograms."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self, *unused: object, **more: object) -> bool:
        """Empties the prefix cache; always returns True."""
        return self.llm_engine.reset_prefix_cache()

    def close(self) -> None:
        """Frees the engine; shuts down its threads and the decode workers."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    # Parameters

    def _check_format(self, asked: str) -> None:
        held = None if self.service.template is None else self.service.template.content_format
        if asked not in ("auto", held):
            raise BadRequest(
                f"chat_template_content_format={asked!r} is one of LLM(...), which has {held!r}.",
                param="chat_template_content_format",
            )

    def _chat_defaults(self, prompt: int) -> SamplingParams:
        defaults = self.service.defaults
        made = self.llm_engine.default_params()
        return replace(made, max_tokens=defaults.get_max_tokens(prompt), min_tokens=defaults.min_tokens)

    def _engine_params(self, given: Params, count: int) -> Sequence[EngineParams]:
        if given is None:
            given = self.llm_engine.default_params()
        if isinstance(given, GenerationParams):
            return [engine_params(given, self.service)] * count
        if len(given) != count:
            raise BadRequest(f"{count} prompts came with {len(given)} sampling parameters.", param="sampling_params")
        return [engine_params(one, self.service) for one in given]

    def _read_prompts(self, items: Sequence[PromptType], params: Sequence[EngineParams]) -> list[Prompt]:
        reading = (read_prompt(self.service, i, p.sampling) for i, p in zip(items, params, strict=True))
        made: list[Prompt] = self._wait(gather_or_cancel(reading))
        return made

    # Running

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[EngineParams],
        use_tqdm: UseTqdm,
        priority: Sequence[int] | None = None,
        adapters: Sequence[AdapterRef | None] = (),
    ) -> list[RequestOutput]:
        def submit() -> Iterator[str]:
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                request_id = f"llm-{next(self._request_numbers)}"
                adapter = adapters[i] if adapters else None
                self.llm_engine.submit(
                    request_id, prompt, final_output_only(p), priority[i] if priority else 0, adapter=adapter
                )
                yield request_id

        return self.llm_engine.run_to_end(submit(), len(prompts), use_tqdm)

    def _wait(self, work: Any) -> Any:
        return self.llm_engine.wait(work)
