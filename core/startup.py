"""From a configuration to an engine that accepts requests, phase by phase. Everything here runs once."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trencadis.core import backend as seam
from trencadis.core.backend import Backend, BackendConfig, LayerKV, SamplerState
from trencadis.core.bucket_env import BucketsAsked
from trencadis.core.buckets import Plan
from trencadis.core.closure import ShapeLimits
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.uniproc import Uniproc
from trencadis.core.kv.arena import Arena
from trencadis.core.kv.pool import RESERVED_BLOCKS, Pool
from trencadis.core.memory_plan import Asked, CachePlan, gib, largest_image_tokens, plan_cpu
from trencadis.core.models import registry
from trencadis.core.models.config import ModelConfig, load_config, read_json
from trencadis.core.models.interface import Persistent
from trencadis.core.planner import make_plan
from trencadis.core.request import MAX_BIAS
from trencadis.core.runner import Runner
from trencadis.core.scheduler import Limits, Scheduler
from trencadis.core.wire import EngineInfo

if TYPE_CHECKING:
    from trencadis.core.engine import Engine, Progress

SPARE_SLOTS = 8
"""Slots beyond max_num_seqs: a slot that waits for its fetch costs no place in the batch."""

MAX_PIXELS = 12_845_056
"""max_pixels of Qwen2.5-VL's processor where a checkpoint names none."""


def build(cls: type[Engine], config: EngineConfig, progress: Progress) -> Engine:
    """Config, backend, plan, weights, caches: an engine on one rank of this process."""
    started = time.perf_counter()
    progress("config", config.model, 0.0)
    model_config = load_config(Path(config.model))
    device = _device(config.device)
    make = seam.load(device)
    package = import_module(make.__module__)
    dtype: torch.dtype = package.pick_dtype(config.dtype, model_config.dtype)
    block_size = _block_size(config, package.pick_policy(config.policy).block_sizes)
    seqs = config.max_num_seqs or 128
    tokens = config.max_num_batched_tokens or 2048
    settings = BackendConfig(
        dtype=dtype,
        block_size=block_size,
        max_tokens=max(tokens, seqs),
        max_rows=seqs,
        vocab_size=model_config.text.vocab,
        max_blocks_per_row=-(-model_config.text.max_positions // block_size),
        options={"policy": config.policy, "threads": str(config.threads or "")},
    )
    backend = make(settings)
    plan = _cache_plan(config, model_config, backend, block_size, seqs, dtype)
    _check_chunking(config, plan, tokens)
    progress("weights", gib(plan.weights_bytes), 0.1)
    model = registry.build(model_config, backend, config)
    progress("caches", f"{plan.kv_tokens} tokens of KV cache", 0.9)
    model.bind(persistent(model_config, plan, backend, dtype, seqs, settings.max_tokens))
    scheduler = Scheduler(
        _limits(config, model_config, plan, tokens, seqs),
        Pool(plan.num_blocks),
        Arena(plan.arena_rows),
        seqs + SPARE_SLOTS,
    )
    depth = backend.policy.depth if config.async_depth is None else config.async_depth
    runner = Runner(backend, model, _shapes(config, model_config, backend, plan, block_size, seqs, tokens))
    info = _info(backend, dtype, plan, model_config, time.perf_counter() - started)
    return cls(scheduler, Uniproc(runner, depth), info)


def _device(asked: str) -> str:
    """``auto`` takes the best device that is built and present; so far that is the CPU."""
    return "cpu" if asked == "auto" else asked.split(":")[0]


def _block_size(config: EngineConfig, sizes: tuple[int, ...]) -> int:
    size = config.block_size or sizes[0]
    if size not in sizes:
        raise StartupError(f"--block-size {size} is not supported here; use one of {', '.join(map(str, sizes))}")
    return size


def _cache_plan(
    config: EngineConfig, model: ModelConfig, backend: Backend, block_size: int, seqs: int, dtype: torch.dtype
) -> CachePlan:
    asked = Asked(
        block_size=block_size,
        max_num_seqs=seqs,
        max_model_len=config.max_model_len,
        kv_bytes=config.kv_cache_memory_bytes or backend.memory.backed(),
        num_blocks=config.num_gpu_blocks_override,
        arena_images=config.encoder_cache_images,
    )
    image_tokens = largest_image_tokens(model.vision, max_pixels(model, config)) if model.vision else 0
    return plan_cpu(model, asked, dtype.itemsize, backend.memory.free(), image_tokens)


def max_pixels(model: ModelConfig, config: EngineConfig) -> int:
    """The processor's upper limit: the flag's, else the checkpoint's, else Qwen2.5-VL's."""
    if "max_pixels" in config.mm_processor_kwargs:
        return int(config.mm_processor_kwargs["max_pixels"])
    raw = read_json(model.path / "preprocessor_config.json") or {}
    size = raw.get("size") or {}
    return int(raw.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS)


def _shapes(
    config: EngineConfig, model: ModelConfig, backend: Backend, cache: CachePlan, size: int, seqs: int, tokens: int
) -> Plan:
    """The shapes that this engine runs. An image needs at most twice its patches, thin ones aside."""
    slots = 8 * largest_image_tokens(model.vision, max_pixels(model, config)) if model.vision else 0
    limits = ShapeLimits(seqs, max(tokens, seqs), cache.max_model_len, size, image_slots=slots)
    return make_plan(backend.policy, limits, BucketsAsked(), model)


def _check_chunking(config: EngineConfig, plan: CachePlan, tokens: int) -> None:
    if not config.enable_chunked_prefill and tokens < plan.max_model_len:
        raise StartupError(
            f"without chunked prefill --max-num-batched-tokens ({tokens}) must be at least "
            f"--max-model-len ({plan.max_model_len})"
        )


def persistent(
    model: ModelConfig, plan: CachePlan, backend: Backend, dtype: torch.dtype, seqs: int, tokens: int
) -> Persistent:
    """The tensors that outlive launches."""
    t = model.text
    slots = seqs + SPARE_SLOTS + 1
    shape = (plan.num_blocks + RESERVED_BLOCKS, plan.block_size, t.kv_heads, t.head_dim)

    def zeros(*dims: int, dtype: torch.dtype) -> torch.Tensor:
        return backend.zeros(dims, dtype)

    return Persistent(
        kv=[LayerKV(zeros(*shape, dtype=dtype), zeros(*shape, dtype=dtype)) for _ in range(t.layers)],
        hidden=zeros(tokens + 1, t.hidden, dtype=dtype),
        arena=zeros(plan.arena_rows, t.hidden, dtype=dtype),
        state=SamplerState(
            last=zeros(slots, dtype=torch.int32),
            counts=zeros(slots, t.vocab, dtype=torch.int32),
            seen=zeros(slots, -(-t.vocab // 8), dtype=torch.uint8),
            bias_id=zeros(slots, MAX_BIAS, dtype=torch.int64),
            bias_value=zeros(slots, MAX_BIAS, dtype=torch.float32),
        ),
    )


def _limits(config: EngineConfig, model: ModelConfig, plan: CachePlan, tokens: int, seqs: int) -> Limits:
    return Limits(
        max_tokens=tokens,
        max_rows=seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        vocab=model.text.vocab,
        eos=model.eos,
        chunked=config.enable_chunked_prefill,
        caching=config.enable_prefix_caching,
        by_priority=config.scheduling_policy == "priority",
        aging=config.priority_aging,
        seed=config.seed,
    )


def _info(backend: Backend, dtype: torch.dtype, plan: CachePlan, model: ModelConfig, seconds: float) -> EngineInfo:
    return EngineInfo(
        device=backend.label,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        vocab_size=model.text.vocab,
        arena_rows=max(plan.arena_rows - 2, 0),
        weights_bytes=plan.weights_bytes,
        kv_bytes=plan.kv_bytes,
        seconds=seconds,
        notes=list(plan.notes),
    )
