"""Computes how many KV blocks ``--kv-offloading-size`` holds in host memory.

Pure; sizes in bytes unless named otherwise.
"""

from __future__ import annotations

from trencadis.core.buckets import Policy
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.memory.byte_units import gib


def format_flag(config: EngineConfig) -> str:
    """Returns the flag with its value, for messages."""
    return f"--kv-offloading-size {config.kv_offloading_size:g}"


def check_kv_offload(config: EngineConfig, policy: Policy, device: str) -> None:
    """Raises StartupError if blocks in host memory are requested but unsupported by the device or other flags."""
    if not config.kv_offloading_size:
        return
    if not policy.host_kv:
        own = "the KV cache of a CPU lies in host memory already; --kv-cache-memory-bytes makes it larger"
        raise StartupError(
            f"{format_flag(config)}: {own if device == 'cpu' else f'{device} copies no blocks; cuda does'}"
        )
    if not config.enable_prefix_caching:
        raise StartupError(
            f"{format_flag(config)} keeps blocks of the prefix cache; leave out --no-enable-prefix-caching"
        )


def host_block_count(config: EngineConfig, block_bytes: int, ranks: int, free: int | None = None) -> int:
    """Returns the number of KV blocks in host memory; 0: none are requested.

    Args:
        block_bytes: bytes of one block on one rank; each rank keeps its own part of a block.
        free: free bytes of the host; None: unknown.

    Raises:
        StartupError: the size holds no block, or exceeds the free memory.
    """
    size = int(config.kv_offloading_size * 2**30)
    if free is not None and size > free:
        raise StartupError(f"{format_flag(config)}: {gib(size)} are asked for, and {gib(free)} of host memory are free")
    count = size // (ranks * block_bytes)
    if config.kv_offloading_size and not count:
        raise StartupError(f"{format_flag(config)}: a KV block of all ranks takes {gib(ranks * block_bytes)}")
    return count


def on_all_stages(model: ModelConfig, block_bytes: int) -> int:
    """Returns the bytes of a KV block over all pipeline stages, from ``block_bytes`` of the part on ``model``'s
    stage.
    """
    return block_bytes // len(model.cached) * (model.text.layers - len(model.text.cross_attention_layers))


def format_note(count: int, block_bytes: int, block_size: int, ranks: int) -> str:
    """Returns the line about host blocks for the start-up and for ``trencadis plan``."""
    held = gib(count * block_bytes * ranks)
    return f"host memory: {count} KV blocks of {block_size} tokens, {held}, for what makes room on the device"
