"""What an emulated card is told and asked beside the bridge. A real card has none of it.

The bridge is what a plug-in offers, and all that ops, programs and copies get. The backend alone asks whether its
bridge is an emulated one, and hands each part what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from trencadis.backends.hpu.bridge import Bridge

LEAST_BLOCKS = 8
"""KV blocks that are held however little the host may back."""


@dataclass(frozen=True)
class EmulatorHooks:
    """The calls that a backend makes to the emulator besides the bridge; a real card has none.

    Args:
        values: tensors hold values; False on a card that keeps shapes alone.
        backed: bytes of KV cache that may be filled with values; None: no limit.
        reserve: charges bytes that nothing backs.
        launch: everything until it closes is one launch, in compile mode.
        layer: runs one layer of a stack; a card without values repeats the figures of an equal one.
        run_out: the next ``capture`` or ``step`` finds no memory.
        no_sync: while open, a launch that waits raises; an emulated card refuses that at all times.
    """

    values: bool
    backed: int | None
    reserve: Callable[[int], None]
    launch: Callable[[], AbstractContextManager[Any]]
    layer: Callable[..., Any]
    run_out: Callable[[str], None]
    no_sync: Callable[[], AbstractContextManager[Any]]

    def hold_blocks(self, wanted: int, block_bytes: int) -> int:
        """How many of the ``wanted`` KV blocks the host backs; the others are booked."""
        most = wanted if self.backed is None else self.backed // block_bytes
        held = min(wanted, max(most, LEAST_BLOCKS))
        if held < wanted:
            self.reserve((wanted - held) * block_bytes)
        return held


@dataclass(frozen=True)
class EmulatedBridge(Bridge):
    """The bridge of an emulated card, with the emulator's hooks."""

    hooks: EmulatorHooks = field(kw_only=True)


def emulator_hooks(bridge: Bridge) -> EmulatorHooks | None:
    """The emulator's hooks; None where a Gaudi is behind the bridge."""
    return bridge.hooks if isinstance(bridge, EmulatedBridge) else None
