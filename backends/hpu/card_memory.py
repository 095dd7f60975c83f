"""Memory of the card, from the two numbers that its bridge reports: free and total bytes."""

from __future__ import annotations

from trencadis.backends.hpu.bridge import Bridge


class HpuMemory:
    """Memory of the card in bytes (``core.device.backend.Memory``).

    ``real_kv_bytes``: host memory that the KV caches of an emulated card may take; None: no limit.
    """

    def __init__(self, bridge: Bridge, backed: int | None = None) -> None:
        self._bridge, self._backed = bridge, backed

    def total(self) -> int:
        return self._bridge.mem_get_info()[1]

    def free(self) -> int:
        return self._bridge.mem_get_info()[0]

    def real_kv_bytes(self) -> int | None:
        return self._backed
