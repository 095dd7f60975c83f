"""Plans the attention of one launch on the CPU, once from the rows' lengths; every layer uses the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu.native import attention_and_row_kernels
from trencadis.backends.cpu.native.attention_and_row_kernels import SingleTokenRows
from trencadis.core.device.backend import Attn, Segments
from trencadis.core.vision_config import WINDOW_SLOTS

GROUP_SLACK, GROUP_RATIO = 32, 1.25
"""A decode group ends before a row longer than ratio x shortest + slack, so that a long row does not pad the others."""

Where = slice | Tensor
"""Token slots of the cache: a slice if blocks are consecutive, so that nothing is copied; else int64 indices."""


@dataclass(frozen=True)
class ChunkSpan:
    """A row of several tokens [start, stop) after ``context`` stored ones.

    ``where`` gives the slots of all visible keys, from position ``first`` on. ``upto``: int32 [tokens] as in ``Attn``;
    None: each token's own position. ``whole``: every token sees all keys.
    """

    start: int
    stop: int
    context: int
    where: Where
    first: int = 0
    upto: Tensor | None = None
    whole: bool = False

    @property
    def count(self) -> int:
        """Number of the row's tokens in this launch."""
        return self.stop - self.start

    def to_flash_span(self, keys: Where) -> attention_and_row_kernels.Span:
        """Returns the span in the form that the library's kernel takes, with the slots of ``where``."""
        return attention_and_row_kernels.Span(
            slice(self.start, self.stop), keys, self.first, self.context, self.upto, self.whole
        )


@dataclass(frozen=True)
class Group:
    """Rows of one token each: ``rows`` of the launch's tokens, keys gathered to one length."""

    rows: Where
    count: int
    where: Where  # [count * length]
    length: int
    mask: Tensor | None  # bool [count, 1, 1, length]; None if all rows have that length


@dataclass(frozen=True)
class AttendPlan:
    """All rows of a launch. ``surplus``: some tokens belong to no request. ``singles``: rows for the library's
    kernel.
    """

    spans: list[ChunkSpan] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    surplus: bool = False
    singles: SingleTokenRows | None = None


class PlanKey(NamedTuple):
    """Key of a launch's plan: the arguments of ``make_plan`` besides the launch."""

    grouped: bool
    window: int
    native: bool


class CpuAttn(Attn):
    """``Attn`` that plans its attention at the first use of each window; ``block_size`` must be set by the caller."""

    block_size: int

    @cached_property
    def plans(self) -> dict[PlanKey, AttendPlan]:
        return {}


def get_plan(attn: Attn, block_size: int, grouped: bool = True, window: int = 0, native: bool = False) -> AttendPlan:
    """Returns the launch's plan; ``CpuAttn`` caches it, other tensors are planned each time."""
    if not isinstance(attn, CpuAttn):
        return make_plan(attn, block_size, grouped, window, native)
    key = PlanKey(grouped, window, native)
    made = attn.plans.get(key)
    if made is None:
        made = attn.plans[key] = make_plan(attn, block_size, grouped, window, native)
    return made


def make_plan(attn: Attn, block_size: int, grouped: bool = True, window: int = 0, native: bool = False) -> AttendPlan:
    """Plans from lengths and block tables.

    Args:
        grouped: rows of one token are attended together.
        window: keys that a token sees, including its own; 0: all.
        native: rows of one token are left to the library's kernel, which gathers nothing.
    """
    starts: NDArray[np.int32] = attn.row_start.numpy()
    context: NDArray[np.int32] = attn.context.numpy()
    blocks: NDArray[np.int32] = attn.blocks.numpy()
    counts = np.diff(starts)
    made = AttendPlan(
        surplus=bool(counts[-1]), singles=_singles(attn, starts, context, counts, window) if native else None
    )
    for row in np.flatnonzero(counts[:-1] > (native or grouped)).tolist():
        made.spans.append(_span(row, attn, starts, context, blocks, block_size, window))
    if grouped and not native:
        single = np.flatnonzero(counts[:-1] == 1).tolist()
        made.groups.extend(_groups(single, starts, context, blocks, block_size, window))
    return made


def _groups(
    single: list[int], starts: NDArray[np.int32], context: NDArray[np.int32], blocks: NDArray[np.int32],
    block_size: int, window: int,
) -> Iterator[Group]:  # fmt: skip
    """Yields rows of one token each, in groups."""
    for rows in (
        _group_similar_lengths(single, np.minimum(context + 1, window) if window else context + 1) if single else ()
    ):
        yield _group(rows, starts, context, blocks, block_size, window)


def _group_similar_lengths(single: list[int], key_counts: NDArray[np.int32]) -> Iterator[list[int]]:
    """Yields rows of one token in groups with similar numbers of keys; ``key_counts``: visible keys of each row of the
    launch.
    """
    single.sort(key=lambda row: int(key_counts[row]))
    first = 0
    for i in range(1, len(single) + 1):
        limit = int(key_counts[single[first]]) * GROUP_RATIO + GROUP_SLACK if i < len(single) else 0
        if i == len(single) or int(key_counts[single[i]]) > limit:
            yield single[first:i]
            first = i


def _singles(
    attn: Attn, starts: NDArray[np.int32], context: NDArray[np.int32], counts: NDArray[np.int32], window: int
) -> SingleTokenRows | None:
    rows = np.flatnonzero(counts[:-1] == 1).astype(np.int32)
    if not len(rows):
        return None
    length = context[rows] + np.int32(1)
    first = np.maximum(length - np.int32(window), 0) if window else np.zeros_like(length)
    return SingleTokenRows(starts[rows], rows, first, length, attn.blocks)


def _span(
    row: int, attn: Attn, starts: NDArray[np.int32], context: NDArray[np.int32], blocks: NDArray[np.int32],
    block_size: int, window: int,
) -> ChunkSpan:  # fmt: skip
    start, stop, before = int(starts[row]), int(starts[row + 1]), int(context[row])
    length = before + stop - start
    first = max(before - window + 1, 0) if window else 0
    made = ChunkSpan(start, stop, before, _slots_from(blocks[row], first, length, block_size), first)
    return made if attn.upto is None else _extend_visibility(made, attn.upto[start:stop], length, window)


def _extend_visibility(span: ChunkSpan, upto: Tensor, length: int, window: int) -> ChunkSpan:
    """Returns ``span`` with the visibility in ``upto``, if some token sees further than its own position."""
    if bool((upto == torch.arange(span.context, length)).all()):
        return span
    return replace(span, upto=upto, whole=int(upto.min()) == length - 1 and not 0 < window < length)


def _group(
    rows: list[int], starts: NDArray[np.int32], context: NDArray[np.int32], blocks: NDArray[np.int32], block_size: int,
    window: int,
) -> Group:  # fmt: skip
    chosen = np.sort(np.asarray(rows))
    tokens = starts[chosen].astype(np.int64)
    lengths = context[chosen].astype(np.int64) + 1
    consecutive = int(tokens[-1] - tokens[0]) == len(tokens) - 1
    where_rows: Where = slice(int(tokens[0]), int(tokens[-1]) + 1) if consecutive else torch.from_numpy(tokens)
    begin = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    longest = int((lengths - begin).max())
    if len(rows) == 1:
        where = _slots_from(blocks[chosen[0]], int(begin[0]), int(lengths[0]), block_size)
        return Group(where_rows, 1, where, longest, None)
    index, mask = _gather_slots(blocks[chosen], begin, lengths, longest, block_size)
    return Group(where_rows, len(rows), index, longest, mask)


def _gather_slots(
    blocks: NDArray[np.int32], begin: NDArray[np.int64], lengths: NDArray[np.int64], longest: int, block_size: int
) -> tuple[Tensor, Tensor | None]:
    """Returns ``Group.where`` and ``Group.mask`` of several rows, whose keys are at positions [begin, lengths)."""
    if begin.any():
        positions = begin[:, None] + np.arange(longest)
        lengths = lengths - begin
        held = np.take_along_axis(blocks, np.minimum(positions // block_size, blocks.shape[1] - 1), axis=1)
        index = held.astype(np.int64) * block_size + positions % block_size
    else:
        index = _indices(blocks, longest, block_size)
    hidden = np.arange(longest)[None] >= lengths[:, None]
    index[hidden] = 0  # the ZERO block
    mask = torch.from_numpy(~hidden)[:, None, None] if hidden.any() else None
    return torch.from_numpy(index.reshape(-1)), mask


def _indices(blocks: NDArray[np.int32], length: int, block_size: int) -> NDArray[np.int64]:
    """Returns token slots [rows, length] of the first ``length`` tokens of each row."""
    held = blocks[:, : -(-length // block_size)].astype(np.int64)
    slots = held[:, :, None] * block_size + np.arange(block_size)
    return np.ascontiguousarray(slots.reshape(len(blocks), -1)[:, :length])


def _slots_from(blocks: NDArray[np.int32], first: int, stop: int, block_size: int) -> Where:
    """Returns the token slots of positions [first, stop) of a row."""
    if not first:
        return _where(blocks, stop, block_size)
    skipped = first // block_size
    where = _where(blocks[skipped:], stop - skipped * block_size, block_size)
    return slice_slots(where, first - skipped * block_size, stop - skipped * block_size)


def slice_slots(where: Where, start: int, stop: int) -> Where:
    """Returns slots ``start`` to ``stop`` of ``where``."""
    if isinstance(where, slice):
        return slice(where.start + start, where.start + stop)
    return where[start:stop]


def _where(blocks: NDArray[np.int32], length: int, block_size: int) -> Where:
    held = blocks[: -(-length // block_size)]
    if bool((np.diff(held) == 1).all()):
        start = int(held[0]) * block_size
        return slice(start, start + length)
    return torch.from_numpy(_indices(held[None], length, block_size)[0])


class ImageSpan(NamedTuple):
    """The slots ``queries`` attend to the slots ``keys``; slices if none of their windows is padded."""

    queries: Where
    keys: Where


def find_image_spans(seg: Segments) -> list[ImageSpan]:
    """Returns, for each image, which slots attend to which.

    Padding windows attend to the slots that are not padding.
    """
    segment, real = seg.segment.tolist(), seg.real.tolist()
    found: list[ImageSpan] = []
    first = 0
    for i in range(1, len(segment) + 1):
        if i < len(segment) and segment[i] == segment[first]:
            continue
        if seg.padding_window is not None and bool((seg.padding_window[first:i] > 0).any()):
            found += _split_padding_windows(seg, first, i)
        elif all(count == WINDOW_SLOTS for count in real[first:i]):
            whole = slice(first * WINDOW_SLOTS, i * WINDOW_SLOTS)
            found.append(ImageSpan(whole, whole))
        else:
            inside = _real_slots(seg, first, i)
            where = inside.flatten().nonzero()[:, 0] + first * WINDOW_SLOTS
            found.append(ImageSpan(where, where))
        first = i
    return found


def _real_slots(seg: Segments, first: int, stop: int) -> torch.Tensor:
    """Returns the real slots, bool [windows, 64]."""
    return torch.arange(WINDOW_SLOTS) < seg.real[first:stop, None]


def _split_padding_windows(seg: Segments, first: int, stop: int) -> list[ImageSpan]:
    assert seg.padding_window is not None
    inside, padding = _real_slots(seg, first, stop), seg.padding_window[first:stop, None] > 0
    every, real_slots, padding_slots = (
        some.flatten().nonzero()[:, 0] + first * WINDOW_SLOTS for some in (inside, inside & ~padding, inside & padding)
    )
    return [ImageSpan(real_slots, every), ImageSpan(padding_slots, real_slots)]


class KeyMask(NamedTuple):
    """Which keys some tokens of a row attend to; all keys outside the positions [first, end) are hidden."""

    first: int
    end: int
    mask: Tensor  # bool [tokens, end - first]


def tile_mask(span: ChunkSpan, start: int, stop: int, window: int) -> KeyMask:
    """Masks the keys of the tokens [start, stop) of a row."""
    position = torch.arange(span.context + start, span.context + stop)[:, None]
    last = position if span.upto is None else span.upto[start:stop, None]
    first = max(span.context + start - window + 1, 0) if window else 0
    end = span.context + stop if span.upto is None else int(last.max()) + 1
    key = torch.arange(first, end)
    mask = key <= last
    if window and first + window < end:
        mask &= key > position - window
    return KeyMask(first, end, mask)
