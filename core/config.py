"""Engine configuration: frozen values from which flags, the YAML reader and the start-up dump are generated."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from trencadis.core.request import MAX_LOGPROBS


def opt(default: Any, help: str, **meta: Any) -> Any:
    """A field that is also a flag. ``meta``: choices, aliases, env, secret, hidden, kind (bytes count json limits)."""
    meta["help"] = help
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine process needs, one field a flag (``max_model_len`` is ``--max-model-len``)."""

    model: str = opt("", "checkpoint folder or hub id; none: the bundled demo")
    tokenizer: str = opt("", "tokenizer folder or hub id (default: the model's)")
    revision: str = opt("", "branch, tag or commit of the hub repository")
    hf_token: str = opt("", "hub token", env=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), secret=True)
    download_dir: str = opt("", "where hub files are kept (default: the hub's cache)")
    trust_remote_code: bool = opt(False, "accepted; no code of a repository is ever run")
    load_format: str = opt(
        "auto", "auto, safetensors, or dummy (random weights)", choices=("auto", "safetensors", "dummy")
    )
    device: str = opt("auto", "auto, cpu, cuda or hpu")
    dtype: str = opt(
        "auto", "weights and activations",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
    )  # fmt: skip
    seed: int = opt(0, "seed of requests that bring none (together with their arrival)")
    max_model_len: int | None = opt(None, "longest prompt plus answer in tokens (default: the model's)", kind="count")
    enforce_eager: bool = opt(False, "no graphs")
    tensor_parallel_size: int = opt(1, "ranks that share one model", aliases=("tp", "-tp"))
    gpu_memory_utilization: float = opt(0.9, "share of device memory", aliases=("device_memory_utilization",))
    graph_reserved_mem: float = opt(
        0.1, "share of the usable memory that is kept for graphs", env=("VLLM_GRAPH_RESERVED_MEM",)
    )
    graph_prompt_ratio: float = opt(
        0.3, "share of the graph memory for prompts, the rest is for decoding", env=("VLLM_GRAPH_PROMPT_RATIO",)
    )
    graph_multimodal_prompt_ratio: float = opt(
        0.3, "share of the prompts' graph memory for text, the rest is for images (models with a vision tower)",
        env=("VLLM_GRAPH_MULTIMODAL_PROMPT_RATIO",),
    )  # fmt: skip
    graph_prompt_strategy: str = opt(
        "min_tokens", "which prompt graphs come first when memory is short", choices=("min_tokens", "max_bs"),
        env=("VLLM_GRAPH_PROMPT_STRATEGY",),
    )  # fmt: skip
    graph_decode_strategy: str = opt(
        "max_bs", "which decode graphs come first when memory is short", choices=("min_tokens", "max_bs"),
        env=("VLLM_GRAPH_DECODE_STRATEGY",),
    )  # fmt: skip
    graph_memory: str = opt(
        "ratio", "ratio: by the shares above; auto: what an earlier start measured", choices=("ratio", "auto")
    )
    warmup: str = opt(
        "full", "full: before serving; background: between steps, hottest first; skip: at first use "
        "(VLLM_SKIP_WARMUP)", choices=("full", "skip", "background"),
    )  # fmt: skip
    warmup_stall: float = opt(0.1, "share of the time that background warm-up may take while requests run")
    warmup_slice: float = opt(
        0.0, "seconds that one pause for background warm-up may hold several pieces; 0: one piece a pause"
    )
    strict_warmup: bool = opt(False, "a bucket that fails in warm-up ends the start-up")
    skip_captures: list[str] = opt([], "buckets in whose capture an engine died", hidden=True)
    kv_cache_memory_bytes: int | None = opt(
        None, "KV cache in bytes, e.g. 256MiB (default: from free memory)", kind="bytes"
    )
    kv_cache_dtype: str = opt("auto", "type of K and V", choices=("auto",))
    block_size: int | None = opt(None, "tokens of a KV block (default: the device's)")
    num_gpu_blocks_override: int | None = opt(None, "KV blocks, for tests")
    enable_prefix_caching: bool = opt(True, "reuse KV blocks of equal prefixes")
    max_num_batched_tokens: int | None = opt(
        None, "tokens of one step (default 2048 on CPU, 8192 elsewhere)", kind="count"
    )
    max_num_seqs: int | None = opt(
        None, "requests that run at a time (default 128 on CPU, 256 elsewhere)", kind="count"
    )
    enable_chunked_prefill: bool = opt(True, "cut long prompts to the step's budget")
    scheduling_policy: str = opt("fcfs", "order of requests", choices=("fcfs", "priority"))
    batch_invariant: bool = opt(
        False, "the same bits for a request in any batch and chunking (VLLM_BATCH_INVARIANT); slower",
        env=("VLLM_BATCH_INVARIANT",),
    )  # fmt: skip
    priority_aging: float = opt(30.0, "seconds after which a waiting request rises one priority level")
    async_depth: int | None = opt(None, "steps in flight beyond the one being scheduled (default: the device's)")
    limit_mm_per_prompt: dict[str, int] = opt({}, 'images per prompt: image=4 or {"image": 4}', kind="limits")
    mm_processor_kwargs: dict[str, Any] = opt(
        {}, "JSON: min_pixels and max_pixels of images, fps and the like of videos", kind="json"
    )
    image_alignment: str = opt(
        "pad", "pad: any size, windows padded; resize: sides rounded to 112 pixels, every window full",
        choices=("pad", "resize"),
    )  # fmt: skip
    encoder_cache_images: int | None = opt(None, "arena size in largest images (at least 2; default 4)")
    mm_processor_cache_gb: float = opt(1.0, "decoded images kept by the API process, GiB")
    generation_config: str = opt("auto", "auto: defaults from the model's generation_config.json; vllm: none")
    override_generation_config: dict[str, Any] = opt({}, "JSON over generation_config.json", kind="json")
    max_logprobs: int = opt(MAX_LOGPROBS, "largest logprobs a request may ask for")
    policy: str = opt("", "test policies of a backend (cpu: padded)", hidden=True)
    threads: int | None = opt(None, "CPU threads of the engine (default: from the cgroup)")
    log_level: str = opt(
        "INFO", "smallest level that is logged", choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        env=("VLLM_LOGGING_LEVEL",),
    )  # fmt: skip
    engine: str = opt("trencadis.core.startup.build:create_engine", "factory of the engine, for tests", hidden=True)

    def without_secrets(self) -> EngineConfig:
        """The configuration without keys, for child processes, which do not ask the hub."""
        empty: dict[str, Any] = dict.fromkeys(self.secret_fields(), "")
        return replace(self, **empty)

    def secret_fields(self) -> set[str]:
        """Names whose values are never printed."""
        return {f.name for f in fields(self) if f.metadata.get("secret")}
