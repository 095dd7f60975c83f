"""Computes how many layers' weights ``--cpu-offload-gb`` puts into host memory.

Pure; sizes in bytes unless named otherwise.

Everything that a configuration puts into host memory: KV blocks and weights. Torch-free.
"""

from __future__ import annotations

from typing import NamedTuple

from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.device_shape_policy import Policy
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.graph_plan_report import LedgerRow
from trencadis.core.host_memory import gib
from trencadis.core.memory import kv_cache_and_offload_size
from trencadis.core.memory.memory_estimator import MemoryEstimator

BUFFERS = 2
"""Number of layer buffers on the device: one layer is computed while the next is copied."""

UNIT = 256
"""Alignment in bytes of a layer's tensors in a buffer."""

GAPS = 64
"""Number of alignment gaps that a buffer has room for, in addition to a layer's bytes."""


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


def format_flag(config: EngineConfig) -> str:
    """Returns the flag with its value, for messages."""
    return f"--cpu-offload-gb {config.cpu_offload_gb:g}"


def check_weight_offload(config: EngineConfig, policy: Policy, device: str) -> None:
    """Raises StartupError if the device does not support weights in host memory."""
    if config.cpu_offload_gb and not policy.host_weights:
        own = "weights lie in host memory already; --quantization makes them smaller"
        other = f"launches of {device} hold no copies from host memory; those of cuda do"
        raise StartupError(f"{format_flag(config)}: {own if device == 'cpu' else other}")


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
        raise StartupError(f"{format_flag(config)}: {model.architecture} says nothing of its layers; leave it out")
    if free is not None and size * ranks > free:
        of = f"{ranks} ranks" if ranks > 1 else "the weights"
        raise StartupError(
            f"{format_flag(config)}: {gib(size * ranks)} are asked for {of}, and {gib(free)} of host memory are free"
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
            f"{format_flag(config)} holds {len(sizes)} layers, and the device keeps room for {BUFFERS}: {works}"
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
    kv_cache_and_offload_size.check_kv_offload(config, policy, device)
    check_weight_offload(config, policy, device)


def offload_rows(config: EngineConfig, estimator: MemoryEstimator, block_size: int) -> tuple[LedgerRow, ...]:
    """Returns the bytes of each kind, over all ranks."""
    block, ranks = estimator.block_bytes(block_size), estimator.ranks
    weights = plan_offload(config, estimator).bytes
    states = kv_cache_and_offload_size.count_host_states(config, estimator.model, estimator.itemsize, ranks)
    whole = kv_cache_and_offload_size.on_all_stages(estimator.model, block)
    blocks = kv_cache_and_offload_size.host_block_count(config, whole, ranks, states=states)
    own = states.slots * estimator.slot_bytes() * ranks
    found = (("weights", weights * ranks), ("KV cache", blocks * block * ranks), ("recurrent states", own))
    return tuple(LedgerRow(name, held) for name, held in found if held)


def offload_notes(config: EngineConfig, estimator: MemoryEstimator, block_size: int) -> list[str]:
    """Returns a line about each kind."""
    block, ranks = (
        kv_cache_and_offload_size.on_all_stages(estimator.model, estimator.block_bytes(block_size)),
        estimator.ranks,
    )
    states = kv_cache_and_offload_size.count_host_states(config, estimator.model, estimator.itemsize, ranks)
    blocks = kv_cache_and_offload_size.host_block_count(config, block, ranks, states=states)
    lines = [kv_cache_and_offload_size.format_note(blocks, block, block_size, ranks, states)] if blocks else []
    return [*notes(config, estimator), *lines]
