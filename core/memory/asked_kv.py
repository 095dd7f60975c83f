"""The size of the KV cache that a user asked for. Pure; sizes in bytes."""

from __future__ import annotations

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.layout import RESERVED_BLOCKS
from trencadis.core.memory.ledger import Division


def kv_asked(config: EngineConfig, block_bytes: int) -> int | None:
    """Bytes of KV cache that the user asked for, in blocks or in bytes; None: as much as fits."""
    if config.num_gpu_blocks_override is not None:
        return (config.num_gpu_blocks_override + RESERVED_BLOCKS) * block_bytes
    return config.kv_cache_memory_bytes


def kv_flag(config: EngineConfig) -> str:
    """The flag that ``kv_asked`` follows, with its value."""
    if config.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
    return f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"


def check_kv_asked(flag: str, asked: int, division: Division) -> None:
    """Raises StartupError where more is asked for than is left."""
    available = division.usable - division.graphs
    if asked > available:
        raise StartupError(f"{flag} is {asked} bytes, more than the {available} that are left for it.")
