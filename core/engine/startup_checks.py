"""The checks that refuse a start before weights are loaded, one list for ``serve`` and ``plan``. Torch-free.

They cover models with cross-attention to images (``TextConfig.cross_attention_layers``), settings that save memory, and
formats of weights and KV cache other than the engine's dtype. A start that does not fit is told the settings with which
it would, the mildest first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage, is_drafting, target_bucket
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.pooling_description import MEAN
from trencadis.core.checkpoint.quant_config import ONLINE, online
from trencadis.core.device_shape_policy import PlannedLayer, PlannedModel, Policy
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.rank_info_and_fingerprint import can_share
from trencadis.core.kv_cache_format import kv_notes
from trencadis.core.memory.host_memory_offload import check_offload
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.memory.weight_bytes import weight_notes
from trencadis.core.shapes.pipeline_partition import check_ranks
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.spec.draft_checkpoint import Drafter, EagleConfig, sizes_of
from trencadis.core.spec.spec_config import resolve_speculation


def check_kv_format(device: str, model: ModelConfig, policy: Policy) -> None:
    """Raises StartupError if a device does not support the requested KV cache format.

    The message names one that does.
    """
    form = model.text.kv
    if form is not None and form.name not in policy.kv_codes:
        has = f"it has {' and '.join(policy.kv_codes)}; " if policy.kv_codes else ""
        raise StartupError(
            f"--kv-cache-dtype {form.requested}: {device} has no such KV cache; {has}--device cpu has it"
        )


def format_notes(model: ModelConfig, itemsize: int, policy: Policy) -> list[str]:
    """Returns notes on both formats for users; ``itemsize``: bytes of the engine's dtype."""
    return [*weight_notes(model, itemsize, policy.quantised), *kv_notes(model.text.kv)]


def mode_notes(model: ModelConfig, plan: Plan, policy: Policy, drafter: Drafter | None = None) -> list[str]:
    """Returns notes on a mode without graphs: what a start compiles instead."""
    if not policy.graphless:
        return []
    notes = [f"graphs: none in {policy.graphless}; VLLM_GRAPH_RESERVED_MEM counts 0 there."]
    if policy.compiled is not None:
        notes.append(policy.compiled(planned_models(model, plan, drafter)))
    return notes


def planned_models(model: ModelConfig, plan: Plan, drafter: Drafter | None) -> list[PlannedModel]:
    """Returns the launches of the model, and those of what drafts for it, if anything does."""
    own = [bucket for bucket in plan.buckets if not is_drafting(bucket)]
    found = [planned_model(model, own, drafter.taps if isinstance(drafter, EagleConfig) else ())]
    if drafter is not None:
        drafting = [target_bucket(bucket) for bucket in plan.buckets if is_drafting(bucket)]
        found.append(planned_model(sizes_of(drafter), drafting))
    return found


def planned_model(model: ModelConfig, buckets: Sequence[Bucket], taps: tuple[int, ...] = ()) -> PlannedModel:
    """Returns the launches ``buckets`` of a model, and which of its layers are alike."""
    c, share = model.text, model.share
    added = model.encodes_images and model.row_parts > 1
    reads = any(c.kv_source(i) != i for i in share.layers)
    return PlannedModel(
        buckets,
        None if model.vision is None else model.vision.launch_parts,
        [planned_layer(c, i) for i in share.layers],
        taps,
        c.windows,
        c.upto,
        joins=not (added or reads or c.layer_inputs or c.cross_attention_layers),
        adds_rows=added,
        causal_layers=c.causal_full_layers,
    )


def planned_layer(c: TextConfig, layer: int) -> PlannedLayer:
    """Returns what layer ``layer`` has in common with others."""
    inputs = (c.uses_second_rotary(layer), c.causal_full_layers and not c.window_of(layer))
    recurrent, experts = layer in c.recurrent_layers, (c.has_experts(layer), c.has_mlp(layer))
    sees = layer in c.cross_attention_layers
    others = (c.mixes_tokens(layer), layer in c.kv_givers, sees)
    own = (c.of_layer(layer), c.window_of(layer), c.score_scale_of(layer))
    return PlannedLayer((inputs, recurrent, experts, others, None if recurrent else own), inputs, recurrent, sees)


def check_cross_attention(config: EngineConfig, model: ModelConfig, policy: Policy) -> None:
    """Raises StartupError if device or options do not support the model's cross-attention; one line."""
    if not model.text.cross_attention_layers:
        return
    name = model.architecture
    if not policy.cross_attention:
        raise StartupError(f"{name}: layers attend to images, which this backend does not implement; --device cpu does")
    if config.pipeline_parallel_size > 1:
        raise StartupError(
            f"{name}: layers of every pipeline stage attend to images, which the first one encodes; "
            "--tensor-parallel-size divides the model instead"
        )
    if model.encoder_data_parallel:
        raise StartupError(
            f"{name}: each rank keeps its share of an image's keys, so that --mm-encoder-tp-mode data does not apply; "
            "weights does"
        )
    if config.batch_invariant:
        raise StartupError(f"--batch-invariant: {name} attends to all images of a launch at once; leave the flag out")
    if config.cpu_offload_gb:
        raise StartupError(
            f"--cpu-offload-gb: a launch of {name} without images leaves layers out, so that none can be copied ahead"
        )


def check_recurrent(config: EngineConfig, model: ModelConfig, policy: Policy) -> None:
    """Raises StartupError if device or options do not support the model's recurrent layers; one line."""
    if model.text.recurrent is None:
        return
    name = model.architecture
    if not policy.recurrent:
        raise StartupError(f"{name}: layers keep a recurrent state, which this backend does not implement")
    if config.batch_invariant:
        raise StartupError(f"--batch-invariant: {name} has recurrent layers, whose bits may depend on the batch")
    if not model.cached:
        raise StartupError(
            f"{name}: a pipeline stage of layers {model.share.first} to {model.share.stop - 1} has no layer with keys "
            "and values; give each stage one (VLLM_PP_LAYER_PARTITION)"
        )


def check_layer_inputs(config: EngineConfig, model: ModelConfig) -> None:
    """Raises StartupError if options cannot go with embeddings for each layer or with shared keys; one line."""
    text, name = model.text, model.architecture
    if not text.layer_inputs and not text.shared_kv:
        return
    if config.pipeline_parallel_size > 1:
        raise StartupError(
            f"{name}: its last layers read keys of earlier ones, and each layer an embedding of the tokens, so that "
            "--pipeline-parallel-size does not apply; --tensor-parallel-size divides the model instead"
        )


def check_adapters(config: EngineConfig, model: ModelConfig, policy: Policy, device: str) -> None:
    """Raises StartupError if adapters are asked for and cannot be served; one line."""
    if not config.enable_lora:
        return
    if not policy.adapters:
        raise StartupError(f"--enable-lora: the {device} backend has no adapters; --device cpu has them")
    if not model_registry.family_of(model.architecture).adapters:
        raise StartupError(f"--enable-lora: adapters of {model.architecture} are merged (trencadis merge-lora)")
    if config.batch_invariant:
        raise StartupError("--enable-lora and --batch-invariant exclude each other: products of adapters are grouped")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise StartupError(
            f"--max-cpu-loras {config.max_cpu_loras} is less than --max-loras {config.max_loras}, which are among them"
        )


def check_start(config: EngineConfig, model: ModelConfig, policy: Policy, device: str) -> None:
    """Checks a configuration against the model, or one of its stages, and the device's policy.

    Raises:
        StartupError: the device or the model does not go with a flag; one line.
    """
    if config.batch_invariant and not policy.invariant_rows:
        raise StartupError(f"--batch-invariant: {config.device} does not promise it; --device cpu does")
    if config.itl_target and not config.enable_chunked_prefill:
        raise StartupError("--itl-target cuts prompts into chunks; it needs --enable-chunked-prefill")
    check_adapters(config, model, policy, device)
    check_offload(config, policy, device)
    resolve_speculation(config, model, policy, device)
    _check_pooling(config, model, policy)
    check_attention(config, model, policy)
    check_ranks(model, device, policy)
    check_kv_format(device, model, policy)


def _check_pooling(config: EngineConfig, model: ModelConfig, policy: Policy) -> None:
    pooling = model.pooling
    if pooling is None:
        return
    if Stage.POOL not in policy.axes or Stage.POOL not in policy.alignment:
        raise StartupError(f"--runner pooling: the {config.device} backend has no POOL stage; --device cpu has")
    if config.batch_invariant and (pooling.classes or pooling.kind == MEAN):
        raise StartupError(
            "--batch-invariant holds for embeddings of the last or first token, not for sums and classes"
        )


def check_attention(config: EngineConfig, model: ModelConfig, policy: Policy) -> None:
    """Raises StartupError where a device cannot hide or show the keys that this model asks for."""
    longest = config.max_model_len or model.text.max_positions
    if not policy.windows and 0 < model.text.window < longest:
        raise StartupError(
            f"{model.path / 'config.json'}: layers see {model.text.window} keys, which the {config.device} backend "
            f"does not implement; --max-model-len {model.text.window} needs no windows, --device cpu has them"
        )
    check_cross_attention(config, model, policy)
    check_recurrent(config, model, policy)
    check_layer_inputs(config, model)
    if model.text.upto and not policy.upto:
        raise StartupError(f"{model.architecture}: the {config.device} backend attends causally; --device cpu does not")
    if model.text.sinks and not policy.sinks:
        where = f"{model.path / 'config.json'}: {model.architecture}"
        raise StartupError(f"{where} has attention sinks, which the {config.device} backend has not; --device cpu has")


def check_chunking(config: EngineConfig, model: ModelConfig, tokens: int, rows: int, max_model_len: int) -> None:
    """Raises StartupError where a step of ``tokens`` tokens and ``rows`` sequences cannot take what it must take whole.

    ``max_model_len``: as the KV cache holds it.
    """
    if model.text.bidirectional_images and config.limit_mm_per_prompt.get("image", 1):
        image_tokens = model_registry.image_needs(model, config.mm_processor_kwargs, config.image_alignment).tokens
        if tokens < image_tokens + rows:
            raise StartupError(
                f"{model.architecture} computes an image at a time: --max-num-batched-tokens ({tokens}) must be at "
                f"least {image_tokens + rows}, its {image_tokens} tokens and one for each of --max-num-seqs"
            )
    if not model.text.causal and tokens < max_model_len:
        raise StartupError(
            f"{model.architecture} computes a whole prompt at a time: --max-num-batched-tokens ({tokens}) must be at "
            f"least --max-model-len ({max_model_len})"
        )
    if not config.enable_chunked_prefill and tokens < max_model_len:
        raise StartupError(
            f"without chunked prefill --max-num-batched-tokens ({tokens}) must be at least "
            f"--max-model-len ({max_model_len})"
        )


MORE_RANKS = (2, 4, 8, 16)
GIB = 1 << 30


class PlannedStart(Protocol):
    """The start-up that does not fit; ``dry_run.DryRun`` is one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model(self) -> ModelConfig: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def device(self) -> Any: ...

    @property
    def estimator(self) -> MemoryEstimator: ...


S = TypeVar("S", bound=PlannedStart)


def list_remedies(start: S, limits: ShapeLimits, blocks: int) -> Iterator[tuple[str, S]]:
    """Flags, and ``start`` with them: less work at a time, quantised weights, weights in host memory, more devices.

    ``blocks``: KV blocks that the device holds.
    """

    def change(**fields: Any) -> S:
        return dataclasses.replace(start, config=dataclasses.replace(start.config, **fields))

    if blocks > 0:
        length = blocks * limits.block_size
        yield f"--max-model-len {length}", change(max_model_len=length)
    for name, values, now in (
        ("max_num_seqs", (128, 64, 32, 16, 8, 4, 2), limits.max_rows),
        ("max_num_batched_tokens", (16384, 8192, 4096, 2048), limits.max_tokens),
        ("encoder_cache_images", (8, 4, 2), limits.units),
    ):
        for value in (v for v in values if v < now):
            yield f"--{name.replace('_', '-')} {value}", change(**{name: value})
    if start.model.quant is None:
        for kind in ONLINE:
            changed = dataclasses.replace(change(quantization=kind), model=quantise_model(start.model, kind))
            yield f"--quantization {kind}", changed
    if start.policy.host_weights:
        for size in (2**n for n in range(1, 10)):
            if size * GIB < start.estimator.weights():
                yield f"--cpu-offload-gb {size}", change(cpu_offload_gb=float(size))
    for ranks in (n for n in MORE_RANKS if n > start.device.ranks and can_share(start.model, n)):
        device = dataclasses.replace(start.device, ranks=ranks)
        yield f"--tensor-parallel-size {ranks}", dataclasses.replace(change(tensor_parallel_size=ranks), device=device)


def quantise_model(model: ModelConfig, kind: str) -> ModelConfig:
    """``model`` with the weights that ``--quantization kind`` makes as they load."""
    names = family_of(model.architecture).names
    rules = dataclasses.replace(online(kind), prefixes=tuple(names.prefixes.items()), inner=names.inner)
    return dataclasses.replace(model, quant=rules)
