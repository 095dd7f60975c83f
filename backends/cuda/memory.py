"""Memory of the card as its driver reports it."""

from __future__ import annotations

import torch


class CudaMemory:
    """Bytes; ``core.backend.Memory``. What torch's allocator holds in reserve counts as taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def backed(self) -> int | None:
        """All memory is real."""
        return None
