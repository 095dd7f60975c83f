"""RMS and layer normalisation."""

from __future__ import annotations

from torch import Tensor

from trencadis.core.checkpoint.model_config import LAYER, RMS_ONE
from trencadis.core.checkpoint.weight_source import WeightSource
from trencadis.core.device.backend import Ops


class RMSNorm:
    """RMS norm: x / rms(x) * weight; ``weight`` is [width].

    ``above_one``: the checkpoint stores weight - 1. The sum is kept in float32, since 16-bit types are coarse near 1.
    """

    def __init__(self, ops: Ops, width: int, eps: float, above_one: bool = False) -> None:
        self.ops, self.width, self.eps, self.above_one = ops, width, eps, above_one
        self.weight: Tensor

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = source.take(f"{name}.weight", (self.width,))
        if self.above_one:
            self.weight = self.weight.float() + 1

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum), each [n, width] in the backend's dtype; the sum is x, or x + residual."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual)

    def heads(self, x: Tensor) -> Tensor:
        """Returns the norm of each head of x [n, heads, width]."""
        return self.ops.rms_norm(x.reshape(-1, self.width), self.weight, self.eps)[0].view(x.shape)

    def joint(self, x: Tensor) -> Tensor:
        """Returns the norm of all heads together of x [n, width], which may be a slice of wider rows."""
        return self.ops.rms_norm(x.contiguous(), self.weight, self.eps)[0]

    def nbytes(self) -> int:
        return self.weight.nbytes


class LayerNorm:
    """Layer norm: (x - mean) / deviation * weight + bias; ``weight`` and ``bias`` are [width]."""

    def __init__(self, ops: Ops, width: int, eps: float) -> None:
        self.ops, self.width, self.eps = ops, width, eps
        self.weight: Tensor
        self.bias: Tensor

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = source.take(f"{name}.weight", (self.width,))
        self.bias = source.take(f"{name}.bias", (self.width,))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum), like ``RMSNorm``."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)

    def nbytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes


Norm = RMSNorm | LayerNorm


def norm_of(kind: str, ops: Ops, width: int, eps: float) -> Norm:
    """Returns the norm for a value of ``TextConfig.norm``."""
    return LayerNorm(ops, width, eps) if kind == LAYER else RMSNorm(ops, width, eps, kind == RMS_ONE)
