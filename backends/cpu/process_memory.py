"""Memory that this process may use: that of the machine, or of its control group if smaller."""

from __future__ import annotations

from trencadis.core.host_memory import free_host, total_host


class CpuMemory:
    """Memory in bytes (``core.device.backend.Memory``)."""

    def total(self) -> int:
        return total_host()

    def real_kv_bytes(self) -> int | None:
        """Returns None: all memory of the device is real."""
        return None

    def free(self) -> int:
        """Returns the bytes that can still be allocated without swapping; page cache counts as free."""
        return free_host()
