"""Linear layers, sharded over ranks by output columns or by input rows. Weights are packed as they are loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.backend import Comm, Ops, Weight
from trencadis.core.errors import StartupError
from trencadis.core.layers.source import Source


class Linear:
    """One packed weight, this rank's share of [out, in]."""

    weight: Weight

    def __init__(self, ops: Ops, comm: Comm) -> None:
        self.ops, self.comm = ops, comm
        self.bytes = 0

    def pack(self, weight: Tensor, bias: Tensor | None) -> None:
        """Packs the raw weight [out, in] and bias [out] of this rank, and keeps only the packed form."""
        self.bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.weight = self.ops.pack_weight(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in of this rank] -> [n, out of this rank] of the backend's dtype."""
        return self.ops.linear(x, self.weight)


class Share(NamedTuple):
    """A rank's share [start, stop) of a dimension, padded to ``width``."""

    start: int
    stop: int
    width: int


class ColumnPart(NamedTuple):
    """One matrix of ``Columns``: its name, output features, and the features of a unit that is never cut."""

    name: str
    size: int
    unit: int


def span(size: int, rank: int, world: int) -> Share:
    """A rank's share: all have equal widths, the last ones padded if ``world`` does not divide ``size``."""
    width = -(-size // world)
    return Share(min(rank * width, size), min((rank + 1) * width, size), width)


class Columns(Linear):
    """Several matrices over one input, fused; each is cut by output.

    Args:
        parts: the matrices; a unit (a head) is never cut, and if a part has fewer units than there are ranks (KV
            heads), they are replicated.
        bias: whether the configuration has biases; others of the checkpoint are ignored.
        fused: the checkpoint stores the parts as one matrix already.
    """

    def __init__(
        self,
        ops: Ops,
        comm: Comm,
        inputs: int,
        parts: tuple[ColumnPart, ...],
        bias: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__(ops, comm)
        self.inputs, self.parts, self.bias, self.fused = inputs, parts, bias, fused

    def load(self, source: Source, base: str) -> None:
        names = [base if self.fused else f"{base}.{name}" for name, _, _ in self.parts]
        weights = self._shards(source, [f"{n}.weight" for n in names], (self.inputs,))
        biases = self._shards(source, [f"{n}.bias" for n in names], ()) if self.bias else None
        self.pack(_join(weights), _join(biases) if biases else None)

    def _shards(self, source: Source, names: list[str], tail: tuple[int, ...]) -> list[Tensor]:
        total, offset, shards = sum(size for _, size, _ in self.parts), 0, []
        for name, (_, size, unit) in zip(names, self.parts, strict=True):
            start, stop, width = unit_span(size, unit, self.comm.rank, self.comm.world)
            shape = (total if self.fused else size, *tail)
            shards.append(pad_rows(source.shard(name, shape, 0, offset + start, offset + stop), width))
            offset += size if self.fused else 0
        return shards


class Rows(Linear):
    """One matrix cut by input; the ranks' partial sums are added, and rank 0 alone adds the bias."""

    def __init__(self, ops: Ops, comm: Comm, inputs: int, outputs: int, unit: int = 1, bias: bool = False) -> None:
        super().__init__(ops, comm)
        self.inputs, self.outputs, self.unit, self.bias = inputs, outputs, unit, bias

    def load(self, source: Source, name: str) -> None:
        start, stop, width = unit_span(self.inputs, self.unit, self.comm.rank, self.comm.world)
        weight = source.shard(f"{name}.weight", (self.outputs, self.inputs), 1, start, stop)
        if stop - start < width:
            weight = functional.pad(weight, (0, width - (stop - start)))
        own_bias = self.bias and self.comm.rank == 0
        self.pack(weight, source.take(f"{name}.bias", (self.outputs,)) if own_bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in of this rank] -> [n, out], summed over ranks, of the backend's dtype."""
        y = self.ops.linear(x, self.weight)
        if self.comm.world == 1:
            return y
        self.ops.cut("collective")
        return self.comm.all_reduce(y)


def unit_span(size: int, unit: int, rank: int, world: int) -> Share:
    """``span`` in whole units; if there are fewer units than ranks, consecutive ranks share one."""
    units = size // unit
    if units < world and unit > 1:
        first = rank * units // world
        return Share(first * unit, (first + 1) * unit, unit)
    share = span(units, rank, world)
    return Share(*(value * unit for value in share))


def check_heads(heads: int, world: int, what: str) -> None:
    """Raises StartupError if ``world`` ranks cannot share ``heads``; the line names the numbers that can."""
    if heads % world:
        sizes = ", ".join(str(w) for w in range(1, heads + 1) if heads % w == 0)
        raise StartupError(f"--tensor-parallel-size {world} does not divide the {heads} {what}; use one of {sizes}")


def pad_rows(t: Tensor, width: int) -> Tensor:
    """[rows, ...] -> [width, ...] of the same dtype, zeros below."""
    missing = width - t.shape[0]
    return t if missing == 0 else torch.cat([t, t.new_zeros((missing, *t.shape[1:]))])


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
