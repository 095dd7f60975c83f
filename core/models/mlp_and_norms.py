"""MLPs, and RMS and layer normalisation.

MLPs are gated, down(act(gate) * up) with gate and up fused, or plain, down(act(up)).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from trencadis.core.checkpoint.model_config import LAYER, RMS_ONE
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Comm, Ops
from trencadis.core.models.linear_and_embedding import ColumnParallelLinear, ColumnPart, RowParallelLinear, TowerLayer
from trencadis.core.quant.quantised_weight_layout_and_bytes import mlp_unit


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


class GatedMLP:
    """The gated MLP; ``inner`` is divided over the ranks, with zero padding if it does not divide evenly.

    ``group``: a rank's share ends at a multiple of it, so that no group of quantised columns is split. ``aligned``: the
    share is padded with zeros to a multiple of it; the padding stays zero after the activation.
    """

    def __init__(
        self, ops: Ops, comm: Comm, width: int, inner: int, bias: bool = False, group: int = 1, act: str = "silu",
        aligned: int = 1,
    ) -> None:  # fmt: skip
        self.ops, self.act = ops, act
        unit = mlp_unit(inner, group, comm.world)
        parts = ColumnPart("gate_proj", inner, unit), ColumnPart("up_proj", inner, unit)
        self.gate_up = ColumnParallelLinear(ops, comm, width, parts, bias=bias, unit=aligned)
        self.down = RowParallelLinear(ops, comm, inner, width, unit=unit, bias=bias, filled=aligned)

    def load(self, source: WeightSource, name: str) -> None:
        self.gate_up.load(source, name)
        self.down.load(source, f"{name}.down_proj")

    def list_layers(self, name: str) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters; ``name``: canonical name of the MLP."""
        yield TowerLayer(name, self.gate_up)
        yield TowerLayer(f"{name}.down_proj", self.down)

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Computes [n, width] -> [n, width] in the backend's dtype; ``rows``: the adapters of the tokens."""
        return self.down.reduce(self.ops.by_pieces(self._own, x) if rows is None else self._own(x, rows))

    def rank_part(self, x: Tensor) -> Tensor:
        """Computes this rank's part of the sum: [n, width] -> [n, width]."""
        return self.ops.by_pieces(self._own, x)

    def _own(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Computes this rank's part of the sum for some rows."""
        return self.down.product(self.ops.act_mul(self.gate_up(x, rows), self.act), rows)

    def nbytes(self) -> int:
        return self.gate_up.bytes + self.down.bytes


class PlainMLP:
    """An MLP like ``GatedMLP`` but without a gate. Padding contributes nothing: its rows of ``down`` are zeros."""

    def __init__(
        self, ops: Ops, comm: Comm, width: int, inner: int, bias: bool = False, group: int = 1, act: str = "gelu",
        aligned: int = 1,
    ) -> None:  # fmt: skip
        self.ops, self.act = ops, act
        unit = mlp_unit(inner, group, comm.world)
        self.up = ColumnParallelLinear(ops, comm, width, (ColumnPart("up_proj", inner, unit),), bias=bias, unit=aligned)
        self.down = RowParallelLinear(ops, comm, inner, width, unit=unit, bias=bias, filled=aligned)

    def load(self, source: WeightSource, name: str) -> None:
        self.up.load(source, name)
        self.down.load(source, f"{name}.down_proj")

    def list_layers(self, name: str) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters; ``name``: canonical name of the MLP."""
        yield TowerLayer(name, self.up)
        yield TowerLayer(f"{name}.down_proj", self.down)

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Computes [n, width] -> [n, width] in the backend's dtype; ``rows``: the adapters of the tokens."""
        return self.down.reduce(self.ops.by_pieces(self._own, x) if rows is None else self._own(x, rows))

    def rank_part(self, x: Tensor) -> Tensor:
        """Computes this rank's part of the sum: [n, width] -> [n, width]."""
        return self.ops.by_pieces(self._own, x)

    def _own(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Computes this rank's part of the sum."""
        return self.down.product(self.ops.act(self.up(x, rows), self.act), rows)

    def nbytes(self) -> int:
        return self.up.bytes + self.down.bytes


MLP = GatedMLP | PlainMLP
