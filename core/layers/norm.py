"""RMS and layer normalisation."""

from __future__ import annotations

from torch import Tensor

from trencadis.core.backend import Ops
from trencadis.core.checkpoint.model_config import LAYER, RMS_ONE
from trencadis.core.layers.weight_source import WeightSource


class RMSNorm:
    """x / rms(x) * weight; ``weight`` is [width].

    ``above_one``: the checkpoint stores weight - 1. It is float32 then: near 1 a 16-bit type has few of its values.
    """

    def __init__(self, ops: Ops, width: int, eps: float, above_one: bool = False) -> None:
        self.ops, self.width, self.eps, self.above_one = ops, width, eps, above_one
        self.weight: Tensor

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = source.take(f"{name}.weight", (self.width,))
        if self.above_one:
            self.weight = self.weight.float() + 1

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum), each [n, width] in the backend's dtype; the sum is x, or x + residual."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual)

    def heads(self, x: Tensor) -> Tensor:
        """The norm of each head of [n, heads, width]."""
        return self.ops.rms_norm(x.reshape(-1, self.width), self.weight, self.eps)[0].view(x.shape)

    def nbytes(self) -> int:
        return self.weight.nbytes


class LayerNorm:
    """(x - mean) / deviation * weight + bias; ``weight`` and ``bias`` are [width]."""

    def __init__(self, ops: Ops, width: int, eps: float) -> None:
        self.ops, self.width, self.eps = ops, width, eps
        self.weight: Tensor
        self.bias: Tensor

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = source.take(f"{name}.weight", (self.width,))
        self.bias = source.take(f"{name}.bias", (self.width,))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As ``RMSNorm``."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)

    def nbytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes


Norm = RMSNorm | LayerNorm


def norm_of(kind: str, ops: Ops, width: int, eps: float) -> Norm:
    """The norm that ``TextConfig.norm`` names."""
    return LayerNorm(ops, width, eps) if kind == LAYER else RMSNorm(ops, width, eps, kind == RMS_ONE)
