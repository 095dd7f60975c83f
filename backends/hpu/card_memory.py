"""Memory of the card, by the only figures that its bridge gives."""

from __future__ import annotations

from trencadis.backends.hpu.bridge import Bridge


class HpuMemory:
    """Bytes; ``core.backend.Memory``. ``real_kv_bytes``: what KV caches may take of an emulated card's host; None:
    all.
    """

    def __init__(self, bridge: Bridge, backed: int | None = None) -> None:
        self._bridge, self._backed = bridge, backed

    def total(self) -> int:
        return self._bridge.mem_get_info()[1]

    def free(self) -> int:
        return self._bridge.mem_get_info()[0]

    def real_kv_bytes(self) -> int | None:
        return self._backed
