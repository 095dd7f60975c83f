"""Everything that a configuration puts into host memory: KV blocks, recurrent states of preempted sequences, weights.

``--kv-offloading-size`` holds the first two, ``--cpu-offload-gb`` the last. Pure; sizes in bytes unless named
otherwise. Torch-free.
"""

from __future__ import annotations

from typing import NamedTuple

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.device_shape_policy import Policy
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.graph_and_bucket_learning_report import LedgerRow
from trencadis.core.host_memory import gib
from trencadis.core.memory.memory_estimator import MemoryEstimator

BUFFERS = 2
"""Number of layer buffers on the device: one layer is computed while the next is copied."""
UNIT = 256
"""Alignment in bytes of a layer's tensors in a buffer."""
GAPS = 64
"""Number of alignment gaps that a buffer has room for, in addition to a layer's bytes."""

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


def kv_offload_flag(config: EngineConfig) -> str:
    """Returns the flag with its value, for messages."""
    return f"--kv-offloading-size {config.kv_offloading_size:g}"


def check_kv_offload(config: EngineConfig, policy: Policy, device: str) -> None:
    """Raises StartupError if blocks in host memory are requested but unsupported by the device or other flags."""
    if not config.kv_offloading_size:
        return
    if not policy.host_kv:
        own = "the KV cache of a CPU lies in host memory already; --kv-cache-memory-bytes makes it larger"
        raise StartupError(
            f"{kv_offload_flag(config)}: {own if device == 'cpu' else f'{device} copies no blocks; cuda does'}"
        )
    if not config.enable_prefix_caching:
        raise StartupError(
            f"{kv_offload_flag(config)} keeps blocks of the prefix cache; leave out --no-enable-prefix-caching"
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
        raise StartupError(
            f"{kv_offload_flag(config)}: {gib(size)} are asked for, and {gib(free)} of host memory are free"
        )
    count = (size - states.slots * states.slot_bytes) // (ranks * block_bytes)
    if config.kv_offloading_size and not count:
        raise StartupError(f"{kv_offload_flag(config)}: a KV block of all ranks takes {gib(ranks * block_bytes)}")
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


class HostWeights(NamedTuple):
    """Weights of one rank in host memory: ``bytes`` of the last ``layers``; ``buffer``: bytes of each buffer."""

    layers: int
    bytes: int
    buffer: int

    @property
    def buffers(self) -> int:
        """Bytes of all buffers."""
        return BUFFERS * self.buffer


NONE = HostWeights(0, 0, 0)


def weight_offload_flag(config: EngineConfig) -> str:
    """Returns the flag with its value, for messages."""
    return f"--cpu-offload-gb {config.cpu_offload_gb:g}"


def check_weight_offload(config: EngineConfig, policy: Policy, device: str) -> None:
    """Raises StartupError if the device does not support weights in host memory."""
    if config.cpu_offload_gb and not policy.host_weights:
        own = "weights lie in host memory already; --quantization makes them smaller"
        other = f"launches of {device} hold no copies from host memory; those of cuda do"
        raise StartupError(f"{weight_offload_flag(config)}: {own if device == 'cpu' else other}")


def plan_offload(
    config: EngineConfig, estimator: MemoryEstimator, free: int | None = None, ranks: int = 1
) -> HostWeights:
    """Returns what each rank puts into host memory: as many of the last layers as the size holds.

    Args:
        free: free bytes of the host; None: unknown.
        ranks: number of ranks that share this host.

    Raises:
        StartupError: the size holds too few layers to save memory, or exceeds the free memory.
    """
    size, model = int(config.cpu_offload_gb * 2**30), estimator.model
    if not size:
        return NONE
    if family_of(model.architecture).weights is not None:
        raise StartupError(
            f"{weight_offload_flag(config)}: {model.architecture} says nothing of its layers; leave it out"
        )
    if free is not None and size * ranks > free:
        of = f"{ranks} ranks" if ranks > 1 else "the weights"
        raise StartupError(
            f"{weight_offload_flag(config)}: {gib(size * ranks)} are asked for {of}, and {gib(free)} of host memory "
            "are free"
        )
    sizes: list[int] = []
    for index in reversed(range(estimator.text.layers)):
        count = estimator.layer(index)
        if sum(sizes) + count > size:
            break
        sizes.append(count)
    if len(sizes) <= BUFFERS:
        least = sum(
            estimator.layer(index)
            for index in range(max(estimator.text.layers - BUFFERS - 1, 0), estimator.text.layers)
        )
        works = f"--cpu-offload-gb {-(-least * 100 // 2**30) / 100:g} holds three"
        if estimator.text.layers <= BUFFERS:
            works = f"the model has {estimator.text.layers}"
        raise StartupError(
            f"{weight_offload_flag(config)} holds {len(sizes)} layers, and the device keeps room for {BUFFERS}: {works}"
        )
    return HostWeights(len(sizes), sum(sizes), -(-max(sizes) // UNIT) * UNIT + GAPS * UNIT)


def notes(config: EngineConfig, estimator: MemoryEstimator) -> list[str]:
    """Returns the line on weights in host memory for the start-up and for ``trencadis plan``; empty: there are none."""
    found = plan_offload(config, estimator)
    if not found.layers:
        return []
    held, saved = gib(found.bytes * estimator.ranks), gib(found.bytes - found.buffers)
    return [
        f"host memory: weights of the last {found.layers} of {estimator.text.layers} layers, {held}; every launch "
        f"copies "
        f"them through two buffers, and the device has {saved} more"
    ]


def check_offload(config: EngineConfig, policy: Policy, device: str) -> None:
    """Raises StartupError if the device does not support a requested kind of offloading."""
    check_kv_offload(config, policy, device)
    check_weight_offload(config, policy, device)


def offload_rows(config: EngineConfig, estimator: MemoryEstimator, block_size: int) -> tuple[LedgerRow, ...]:
    """Returns the bytes of each kind, over all ranks."""
    block, ranks = estimator.block_bytes(block_size), estimator.ranks
    weights = plan_offload(config, estimator).bytes
    states = count_host_states(config, estimator.model, estimator.itemsize, ranks)
    whole = on_all_stages(estimator.model, block)
    blocks = host_block_count(config, whole, ranks, states=states)
    own = states.slots * estimator.slot_bytes() * ranks
    found = (("weights", weights * ranks), ("KV cache", blocks * block * ranks), ("recurrent states", own))
    return tuple(LedgerRow(name, held) for name, held in found if held)


def offload_notes(config: EngineConfig, estimator: MemoryEstimator, block_size: int) -> list[str]:
    """Returns a line about each kind."""
    block, ranks = (
        on_all_stages(estimator.model, estimator.block_bytes(block_size)),
        estimator.ranks,
    )
    states = count_host_states(config, estimator.model, estimator.itemsize, ranks)
    blocks = host_block_count(config, block, ranks, states=states)
    lines = [format_note(blocks, block, block_size, ranks, states)] if blocks else []
    return [*notes(config, estimator), *lines]
