"""The size of the KV cache that the user requests. Pure; sizes in bytes."""

from __future__ import annotations

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.memory.ledger import MemorySplit
from trencadis.core.shared_constants import RESERVED_BLOCKS


def requested_kv_bytes(config: EngineConfig, block_bytes: int) -> int | None:
    """Returns the bytes of KV cache that the user requests, in blocks or in bytes; None: as much as fits."""
    if config.num_gpu_blocks_override is not None:
        return (config.num_gpu_blocks_override + RESERVED_BLOCKS) * block_bytes
    return config.kv_cache_memory_bytes


def kv_flag(config: EngineConfig) -> str:
    """Returns the flag that ``requested_kv_bytes`` follows, with its value."""
    if config.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
    return f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"


def check_requested_kv(flag: str, asked: int, memory_split: MemorySplit) -> None:
    """Raises StartupError if more is requested than is left."""
    available = memory_split.usable - memory_split.graphs
    if asked > available:
        raise StartupError(f"{flag} is {asked} bytes, more than the {available} that are left for it.")
