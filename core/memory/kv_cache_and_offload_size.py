"""Computes how many KV blocks, and recurrent states of preempted sequences, ``--kv-offloading-size`` holds.

Pure; sizes in bytes unless named otherwise.

The size of the KV cache that the user requests. Pure; sizes in bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device_shape_policy import Policy
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.host_memory import gib
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.memory.memory_division import MemorySplit

STATE_SHARE = 0.25
"""Share of ``--kv-offloading-size`` that recurrent states of preempted sequences take at most."""

MOST_STATES = 256


class HostStateSlots(NamedTuple):
    """The number of recurrent states in host memory, and the bytes of each on all ranks and stages."""

    slots: int = 0
    slot_bytes: int = 0


NO_STATES = HostStateSlots()


def count_host_states(config: EngineConfig, model: ModelConfig, itemsize: int, ranks: int) -> HostStateSlots:
    """Returns how many states host memory holds; ``itemsize``: of the engine's dtype."""
    held = model.text.recurrent
    if held is None:
        return NO_STATES
    each = len(held.layers) * held.slot_bytes(itemsize, ranks) * ranks
    return HostStateSlots(min(int(STATE_SHARE * config.kv_offloading_size * 2**30) // each, MOST_STATES), each)


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


def host_block_count(
    config: EngineConfig, block_bytes: int, ranks: int, free: int | None = None, states: HostStateSlots = NO_STATES
) -> int:
    """Returns the number of KV blocks in host memory; 0: none are requested.

    Args:
        block_bytes: bytes of one block on one rank; each rank keeps its own part of a block.
        free: free bytes of the host; None: unknown.
        states: recurrent states, which have a part of the size.

    Raises:
        StartupError: the size holds no block, or exceeds the free memory.
    """
    size = int(config.kv_offloading_size * 2**30)
    if free is not None and size > free:
        raise StartupError(f"{format_flag(config)}: {gib(size)} are asked for, and {gib(free)} of host memory are free")
    count = (size - states.slots * states.slot_bytes) // (ranks * block_bytes)
    if config.kv_offloading_size and not count:
        raise StartupError(f"{format_flag(config)}: a KV block of all ranks takes {gib(ranks * block_bytes)}")
    return count


def on_all_stages(model: ModelConfig, block_bytes: int) -> int:
    """Returns the bytes of a KV block over all pipeline stages, from ``block_bytes`` of the part on ``model``'s
    stage.
    """
    return block_bytes // len(model.cached) * model.text.cached_layers


def format_note(count: int, block_bytes: int, block_size: int, ranks: int, states: HostStateSlots = NO_STATES) -> str:
    """Returns the line about host memory for the start-up and for ``trencadis plan``."""
    line = f"host memory: {count} KV blocks of {block_size} tokens, {gib(count * block_bytes * ranks)}"
    if states.slots:
        line += f", and {states.slots} states of preempted sequences, {gib(states.slots * states.slot_bytes)}"
    line += ", for what makes room on the device"
    if states.slot_bytes and not states.slots:
        line += f"; a recurrent state takes {gib(states.slot_bytes)}, so that preempted sequences compute theirs again"
    return line
