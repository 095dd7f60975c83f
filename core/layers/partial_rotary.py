"""Partly rotated heads: reorders the values of q and k as rotary ops expect them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trencadis.core.layers.weight_source import StackedPart, StoredRows, WeightSource, stack
from trencadis.core.quant.quantised_tensor import QTensor, join_weights

ROTATED = ("q_proj", "k_proj")


class PartialRotarySource:
    """Wraps a source and moves the rotated values of a head, stored at its start, to the start of each half.

    Rotary ops rotate the first half of a head against the second. Scores are sums over a head's values, so that any
    order is valid if q and k share it.

    Args:
        rotary_dim: number of rotated values of a head.
    """

    def __init__(self, source: WeightSource, head_dim: int, rotary_dim: int) -> None:
        self.source, self.head_dim = source, head_dim
        middle = rotary_dim + (head_dim - rotary_dim) // 2
        self.spans = ((0, rotary_dim // 2), (rotary_dim, middle), (rotary_dim // 2, rotary_dim), (middle, head_dim))

    def _reorder(self, name: str, part: Tensor) -> Tensor:
        if name.rpartition(".")[0].rpartition(".")[2] not in ROTATED:
            return part
        heads = part.reshape(-1, self.head_dim, *part.shape[1:])
        return torch.cat([heads[:, a:b] for a, b in self.spans], 1).reshape(part.shape)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._reorder(name, self.source.take(name, shape))

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        return self._reorder(name, self.source.shard(name, shape, dim, start, stop))

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def stored(self, parts: Sequence[StackedPart], inputs: int, start: int, stop: int) -> StoredRows | None:
        give = getattr(self.source, "stored", None)
        rotates = any(part.name.rpartition(".")[0].rpartition(".")[2] in ROTATED for part in parts)
        found: StoredRows | None = None if rotates or give is None else give(parts, inputs, start, stop)
        return found

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        found = self.source.take_quantised(name, shape, dim, start, stop, own)
        if found is None or name.rpartition(".")[2] not in ROTATED:
            return found
        heads = range(0, stop - start, self.head_dim)
        return join_weights([found.rows(head + a, head + b) for head in heads for a, b in self.spans])

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def kv_scale(self, name: str, kind: str) -> float:
        return self.source.kv_scale(name, kind)
