"""Memory of the card, by the only figures that its bridge gives."""

from __future__ import annotations

from trencadis.backends.hpu.bridge import Bridge


class HpuMemory:
    """Bytes; ``core.backend.Memory``."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def total(self) -> int:
        return self._bridge.mem_get_info()[1]

    def free(self) -> int:
        return self._bridge.mem_get_info()[0]

    def backed(self) -> int | None:
        return self._bridge.backed
