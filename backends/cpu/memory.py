"""Memory that this process may use: the machine's, or its control group's if that is smaller."""

from __future__ import annotations

from trencadis.core.memory.free_host import free_host, total_host


class CpuMemory:
    """Bytes; ``core.backend.Memory``."""

    def total(self) -> int:
        return total_host()

    def backed(self) -> int | None:
        """All memory is real."""
        return None

    def free(self) -> int:
        """Bytes that can still be allocated without swapping; page cache counts as free."""
        return free_host()
