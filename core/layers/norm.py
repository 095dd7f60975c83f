"""RMS normalisation."""

from __future__ import annotations

from torch import Tensor

from trencadis.core.backend import Ops
from trencadis.core.layers.source import Source


class RMSNorm:
    """x / rms(x) * weight; ``weight`` is [width]."""

    def __init__(self, ops: Ops, width: int, eps: float) -> None:
        self.ops, self.width, self.eps = ops, width, eps
        self.weight: Tensor

    def load(self, source: Source, name: str) -> None:
        self.weight = source.take(f"{name}.weight", (self.width,))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum), each [n, width] in the backend's dtype; the sum is x, or x + residual."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual)

    def nbytes(self) -> int:
        return self.weight.nbytes
