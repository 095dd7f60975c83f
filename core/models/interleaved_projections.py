"""Reads the projections of recurrent layers that are stored interleaved by key head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.checkpoint.layer_parts import RecurrentConfig
from trencadis.core.checkpoint.weight_source import StackedPart, WeightSource, stack
from trencadis.core.quant.quantised_tensor import QTensor, join_weights


class StoredPart(NamedTuple):
    """A part of a stored matrix: the matrix, its rows of one key head, and the spans of the part among them."""

    stored: str
    rows: int
    spans: tuple[tuple[int, int], ...]


class InterleavedSource:
    """A source in which ``in_proj_qkvz`` and ``in_proj_ba`` are ``in_proj_qkv``, ``in_proj_z``, ``_b`` and ``_a``.

    For each key head, the stored matrices hold its query, its key, the values and the gates of the value heads that it
    serves; and the betas and the decays of these heads.
    """

    def __init__(self, source: WeightSource, r: RecurrentConfig) -> None:
        self.source, self.heads = source, r.key_heads
        group, d = r.value_heads // r.key_heads, r.key_dim
        values = 2 * d + group * r.value_dim
        wide = values + group * r.value_dim
        self._parts = {
            "in_proj_qkv": StoredPart("in_proj_qkvz", wide, ((0, d), (d, 2 * d), (2 * d, values))),
            "in_proj_z": StoredPart("in_proj_qkvz", wide, ((values, wide),)),
            "in_proj_b": StoredPart("in_proj_ba", 2 * group, ((0, group),)),
            "in_proj_a": StoredPart("in_proj_ba", 2 * group, ((group, 2 * group),)),
        }

    def _find(self, module: str) -> tuple[str, StoredPart] | None:
        """Returns the stored module of a canonical one, and what it holds; None: it is stored under its own name."""
        outer, _, name = module.rpartition(".")
        part = self._parts.get(name)
        return None if part is None else (f"{outer}.{part.stored}", part)

    def _spans(self, part: StoredPart) -> list[tuple[int, int]]:
        """Returns the stored rows of a part in canonical order: of each span, those of all key heads."""
        starts = range(0, self.heads * part.rows, part.rows)
        return [(start + a, start + b) for a, b in part.spans for start in starts]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        module, _, kind = name.rpartition(".")
        found = self._find(module)
        if found is None:
            return self.source.take(name, shape)
        stored, part = found
        whole = self.source.take(f"{stored}.{kind}", (self.heads * part.rows, *shape[1:]))
        return torch.cat([whole[a:b] for a, b in self._spans(part)])

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        if self._find(name.rpartition(".")[0]) is None:
            return self.source.shard(name, shape, dim, start, stop)
        return self.take(name, shape).narrow(dim, start, stop - start).contiguous()

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        found = self._find(name)
        if found is None:
            return self.source.take_quantised(name, shape, dim, start, stop, own)
        stored, part = found
        rows = self.heads * part.rows
        whole = self.source.take_quantised(stored, (rows, shape[1]), 0, 0, rows)
        if whole is None:
            return None
        return join_weights([whole.rows(a, b) for a, b in self._spans(part)]).rows(start, stop)

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def kv_scale(self, name: str, kind: str) -> float:
        return self.source.kv_scale(name, kind)
