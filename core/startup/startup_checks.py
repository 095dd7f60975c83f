"""The checks that refuse a start before weights are loaded, one list for ``serve`` and ``plan``. Torch-free."""

from __future__ import annotations

from trencadis.core.buckets import Policy, Stage
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.pooling_config import MEAN
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.models import registry
from trencadis.core.shapes.pipeline_partition import check_ranks
from trencadis.core.spec.spec_settings import resolve_speculation
from trencadis.core.startup.cross_attention_checks import check_cross_attention
from trencadis.core.startup.format_checks import check_kv_format
from trencadis.core.startup.host_offload import check_offload


def check_start(config: EngineConfig, model: ModelConfig, policy: Policy, device: str) -> None:
    """Checks a configuration against the model, or one of its stages, and the device's policy.

    Raises:
        StartupError: the device or the model does not go with a flag; one line.
    """
    if config.batch_invariant and not policy.invariant_rows:
        raise StartupError(f"--batch-invariant: {config.device} does not promise it; --device cpu does")
    if config.itl_target and not config.enable_chunked_prefill:
        raise StartupError("--itl-target cuts prompts into chunks; it needs --enable-chunked-prefill")
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
    if model.text.upto and not policy.upto:
        raise StartupError(f"{model.architecture}: the {config.device} backend attends causally; --device cpu does not")


def check_chunking(config: EngineConfig, model: ModelConfig, tokens: int, rows: int, max_model_len: int) -> None:
    """Raises StartupError where a step of ``tokens`` tokens and ``rows`` sequences cannot take what it must take whole.

    ``max_model_len``: as the KV cache holds it.
    """
    if model.text.bidirectional_images:
        image_tokens = registry.image_needs(model, config.mm_processor_kwargs, config.image_alignment).tokens
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
