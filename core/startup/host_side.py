"""What a configuration puts into host memory beside a device: KV blocks, weights. Torch-free."""

from __future__ import annotations

from trencadis.core.buckets import Policy
from trencadis.core.config import EngineConfig
from trencadis.core.memory import host_tier, host_weights
from trencadis.core.memory.estimate import Sized
from trencadis.core.report import LedgerRow


def check(config: EngineConfig, policy: Policy, device: str) -> None:
    """Raises StartupError where the device has no use for one of them."""
    host_tier.check(config, policy, device)
    host_weights.check(config, policy, device)


def rows(config: EngineConfig, sized: Sized, block_size: int) -> tuple[LedgerRow, ...]:
    """Bytes of each, of all ranks."""
    block, ranks = sized.block_bytes(block_size), sized.ranks
    weights = host_weights.moved(config, sized).bytes
    blocks = host_tier.blocks(config, host_tier.on_all_stages(sized.model, block), ranks)
    found = (("weights", weights * ranks), ("KV cache", blocks * block * ranks))
    return tuple(LedgerRow(name, held) for name, held in found if held)


def notes(config: EngineConfig, sized: Sized, block_size: int) -> list[str]:
    """A line about each."""
    block, ranks = host_tier.on_all_stages(sized.model, sized.block_bytes(block_size)), sized.ranks
    blocks = host_tier.blocks(config, block, ranks)
    lines = [host_tier.note(blocks, block, block_size, ranks)] if blocks else []
    return [*host_weights.notes(config, sized), *lines]
