"""Heads of which a part turns: q and k with their values in the order that rotary ops take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trencadis.core.layers.source import Source, StackedPart, StoredRows, stack
from trencadis.core.quant.tensor import QTensor, joined

TURNING = ("q_proj", "k_proj")


class PartlyTurned:
    """A source whose heads hold what turns at the start of each half; files hold it at the start of the head.

    Rotary ops turn the first half of a head against the second. Scores are sums over a head's values, so that q and k
    may have them in any order that is the same.

    Args:
        turned: values of a head that turn.
    """

    def __init__(self, source: Source, head_dim: int, turned: int) -> None:
        self.source, self.head_dim = source, head_dim
        middle = turned + (head_dim - turned) // 2
        self.spans = ((0, turned // 2), (turned, middle), (turned // 2, turned), (middle, head_dim))

    def _ordered(self, name: str, part: Tensor) -> Tensor:
        if name.rpartition(".")[0].rpartition(".")[2] not in TURNING:
            return part
        heads = part.reshape(-1, self.head_dim, *part.shape[1:])
        return torch.cat([heads[:, a:b] for a, b in self.spans], 1).reshape(part.shape)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._ordered(name, self.source.take(name, shape))

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        return self._ordered(name, self.source.shard(name, shape, dim, start, stop))

    def stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def stored(self, parts: Sequence[StackedPart], inputs: int, start: int, stop: int) -> StoredRows | None:
        give = getattr(self.source, "stored", None)
        turns = any(part.name.rpartition(".")[0].rpartition(".")[2] in TURNING for part in parts)
        found: StoredRows | None = None if turns or give is None else give(parts, inputs, start, stop)
        return found

    def quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        found = self.source.quantised(name, shape, dim, start, stop, own)
        if found is None or name.rpartition(".")[2] not in TURNING:
            return found
        heads = range(0, stop - start, self.head_dim)
        return joined([found.rows(head + a, head + b) for head in heads for a, b in self.spans])

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def kv_scale(self, name: str, kind: str) -> float:
        return self.source.kv_scale(name, kind)
