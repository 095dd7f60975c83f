"""Everything that a configuration puts into host memory: KV blocks and weights. Torch-free."""

from __future__ import annotations

from trencadis.core.buckets import Policy
from trencadis.core.config import EngineConfig
from trencadis.core.engine_stats import LedgerRow
from trencadis.core.memory import kv_offload_size, weight_offload
from trencadis.core.memory.estimate import MemoryEstimator


def check_offload(config: EngineConfig, policy: Policy, device: str) -> None:
    """Raises StartupError if the device does not support a requested kind of offloading."""
    kv_offload_size.check_kv_offload(config, policy, device)
    weight_offload.check_weight_offload(config, policy, device)


def offload_rows(config: EngineConfig, estimator: MemoryEstimator, block_size: int) -> tuple[LedgerRow, ...]:
    """Returns the bytes of each kind, over all ranks."""
    block, ranks = estimator.block_bytes(block_size), estimator.ranks
    weights = weight_offload.plan_offload(config, estimator).bytes
    blocks = kv_offload_size.host_block_count(config, kv_offload_size.on_all_stages(estimator.model, block), ranks)
    found = (("weights", weights * ranks), ("KV cache", blocks * block * ranks))
    return tuple(LedgerRow(name, held) for name, held in found if held)


def offload_notes(config: EngineConfig, estimator: MemoryEstimator, block_size: int) -> list[str]:
    """Returns a line about each kind."""
    block, ranks = kv_offload_size.on_all_stages(estimator.model, estimator.block_bytes(block_size)), estimator.ranks
    blocks = kv_offload_size.host_block_count(config, block, ranks)
    lines = [kv_offload_size.format_note(blocks, block, block_size, ranks)] if blocks else []
    return [*weight_offload.notes(config, estimator), *lines]
