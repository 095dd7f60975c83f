"""Plans the attention of one launch on the CPU, once from the rows' lengths; every layer uses the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.core.backend import Attn

GROUP_SLACK, GROUP_RATIO = 32, 1.25
"""A decode group ends at a row longer than ratio x shortest + slack, so that a long row does not pad the others."""

Where = slice | Tensor
"""Token slots of the cache: a slice if blocks are consecutive, so that nothing is copied; else int64 indices."""


@dataclass(frozen=True)
class ChunkSpan:
    """A row of several tokens [start, stop) that follow ``context`` stored ones."""

    start: int
    stop: int
    context: int
    where: Where


@dataclass(frozen=True)
class Group:
    """Rows of one token each: ``rows`` of the launch's tokens, keys gathered to one length."""

    rows: Where
    count: int
    where: Where  # [count * length]
    length: int
    mask: Tensor | None  # bool [count, 1, 1, length]; None where all rows have that length


@dataclass(frozen=True)
class AttendPlan:
    """All rows of a launch; ``surplus``: some tokens belong to no request."""

    spans: list[ChunkSpan] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    surplus: bool = False


class CpuAttn(Attn):
    """``Attn`` that makes its plan at the first use; whoever fills it sets ``block_size``."""

    block_size: int

    @cached_property
    def plan(self) -> AttendPlan:
        return plan(self, self.block_size)

    @cached_property
    def spans(self) -> AttendPlan:
        return plan(self, self.block_size, grouped=False)


def plan_of(attn: Attn, block_size: int, grouped: bool = True) -> AttendPlan:
    """The launch's plan; ``CpuAttn`` keeps it, other tensors are planned anew."""
    if isinstance(attn, CpuAttn):
        return attn.plan if grouped else attn.spans
    return plan(attn, block_size, grouped)


def plan(attn: Attn, block_size: int, grouped: bool = True) -> AttendPlan:
    """Plans from lengths and block tables; ``grouped``: rows of one token are attended to together."""
    starts: NDArray[np.int32] = attn.row_start.numpy()
    context: NDArray[np.int32] = attn.context.numpy()
    blocks: NDArray[np.int32] = attn.blocks.numpy()
    counts = np.diff(starts)
    made = AttendPlan(surplus=bool(counts[-1]))
    single: list[int] = []
    for row in np.nonzero(counts[:-1])[0].tolist():
        if grouped and counts[row] == 1:
            single.append(row)
            continue
        length = int(context[row] + counts[row])
        where = _where(blocks[row], length, block_size)
        made.spans.append(ChunkSpan(int(starts[row]), int(starts[row + 1]), int(context[row]), where))
    single.sort(key=lambda row: int(context[row]))
    first = 0
    for i in range(1, len(single) + 1):
        limit = (int(context[single[first]]) + 1) * GROUP_RATIO + GROUP_SLACK if i < len(single) else 0
        if i == len(single) or int(context[single[i]]) + 1 > limit:
            made.groups.append(_group(single[first:i], starts, context, blocks, block_size))
            first = i
    return made


def _group(
    rows: list[int], starts: NDArray[np.int32], context: NDArray[np.int32], blocks: NDArray[np.int32], block_size: int
) -> Group:
    chosen = np.sort(np.asarray(rows))
    tokens = starts[chosen].astype(np.int64)
    lengths = context[chosen].astype(np.int64) + 1
    longest = int(lengths.max())
    consecutive = int(tokens[-1] - tokens[0]) == len(tokens) - 1
    where_rows: Where = slice(int(tokens[0]), int(tokens[-1]) + 1) if consecutive else torch.from_numpy(tokens)
    if len(rows) == 1:
        return Group(where_rows, 1, _where(blocks[chosen[0]], longest, block_size), longest, None)
    index = _indices(blocks[chosen], longest, block_size)
    hidden = np.arange(longest)[None] >= lengths[:, None]
    index[hidden] = 0  # the ZERO block
    mask = torch.from_numpy(~hidden)[:, None, None] if hidden.any() else None
    return Group(where_rows, len(rows), torch.from_numpy(index.reshape(-1)), longest, mask)


def _indices(blocks: NDArray[np.int32], length: int, block_size: int) -> NDArray[np.int64]:
    """[rows, length] token slots of the first ``length`` tokens of each row."""
    held = blocks[:, : -(-length // block_size)].astype(np.int64)
    slots = held[:, :, None] * block_size + np.arange(block_size)
    return np.ascontiguousarray(slots.reshape(len(blocks), -1)[:, :length])


def _where(blocks: NDArray[np.int32], length: int, block_size: int) -> Where:
    held = blocks[: -(-length // block_size)]
    if bool((np.diff(held) == 1).all()):
        start = int(held[0]) * block_size
        return slice(start, start + length)
    return torch.from_numpy(_indices(held[None], length, block_size)[0])
