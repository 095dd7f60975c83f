"""Calls between the backend and an emulated card that are not part of the bridge. A real card has none.

The bridge is the plug-in's interface, and all that ops, programs and copies get. Only the backend checks if its bridge
is an emulated one, and passes the hooks to the parts that need them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from trencadis.backends.hpu.bridge import Bridge

LEAST_BLOCKS = 8
"""Minimum number of KV blocks with values, whatever the host's memory allows."""


@dataclass(frozen=True)
class EmulatorHooks:
    """The calls that a backend makes to the emulator besides the bridge; a real card has none.

    Args:
        values: tensors hold values; False on a card that keeps shapes alone.
        backed: bytes of KV cache that may be filled with values; None: no limit.
        reserve: charges bytes that have no host memory.
        launch: context manager; everything inside is one launch, in compile mode.
        layer: runs one layer of a stack; a card without values repeats the figures of an equal layer.
        run_out: makes the next ``capture`` or ``step`` run out of memory.
        no_sync: context manager inside which a launch that waits raises; an emulated card refuses that at all times.
    """

    values: bool
    backed: int | None
    reserve: Callable[[int], None]
    launch: Callable[[], AbstractContextManager[Any]]
    layer: Callable[..., Any]
    run_out: Callable[[str], None]
    no_sync: Callable[[], AbstractContextManager[Any]]

    def hold_blocks(self, wanted: int, block_bytes: int) -> int:
        """Returns how many of the ``wanted`` KV blocks get host memory; the bytes of the others are only reserved."""
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
    """Returns the emulator's hooks; None if the bridge is a real Gaudi's."""
    return bridge.hooks if isinstance(bridge, EmulatedBridge) else None
