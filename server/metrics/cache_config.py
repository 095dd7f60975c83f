"""``vllm:cache_config_info``: the KV cache's configuration as labels, as vLLM names them."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import GaugeMetricFamily

from trencadis.core.config import EngineConfig
from trencadis.core.engine_stats import EngineInfo

ABSENT = {
    "is_attention_free": "False", "sliding_window": "None", "prefix_caching_hash_algo": "sha256",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None", "mamba_page_size_padded": "None", "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto", "mamba_cache_mode": "none", "enable_mamba_fine_grained_prefix_cache": "False",
    "replayssm_buffer_len": "None", "use_replayssm": "False", "prefix_cache_retention_interval": "None",
    "kv_cache_dtype_skip_layers": "[]", "skip_page_size_padded": "None", "attn_group_size": "None",
    "calculate_kv_scales": "False", "swap_space": "0",
}  # fmt: skip
"""Labels with the same value on every server of this kind, most of them for features that it does not have."""


def make_cache_labels(config: EngineConfig, info: EngineInfo) -> dict[str, str]:
    """Returns every label with its value; None is written as in Python, as everywhere."""
    tokens = info.num_blocks * info.block_size
    concurrency = tokens / info.max_model_len if info.max_model_len else None
    own = {
        "block_size": info.block_size,
        "user_specified_block_size": config.block_size is not None,
        "cache_dtype": config.kv_cache_dtype,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "num_gpu_blocks": info.num_blocks,
        "num_cpu_blocks": info.host_blocks,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "kv_cache_size_tokens": tokens,
        "kv_cache_max_concurrency": None if concurrency is None else round(concurrency, 2),
        "effective_attention_block_size": info.block_size,
        "prefix_match_unit": info.block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "kv_offloading_size": config.kv_offloading_size or None,
        "kv_offloading_backend": "native" if config.kv_offloading_size else None,
    }
    return {**ABSENT, **{name: str(value) for name, value in own.items()}}


def make_cache_config_info(values: Sequence[str], config: EngineConfig, info: EngineInfo) -> GaugeMetricFamily:
    """Returns the gauge, whose value is 1. ``values``: of the labels model_name and engine."""
    labels = make_cache_labels(config, info)
    gauge = GaugeMetricFamily(
        "vllm:cache_config_info", "the KV cache's configuration", labels=("model_name", "engine", *labels)
    )
    gauge.add_metric((*values, *labels.values()), 1)
    return gauge
