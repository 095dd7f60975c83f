"""M-RoPE: rotary positions on three axes (time, height, width) of a prompt with media. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from trencadis.multimodal.patch_packing import Grid

if TYPE_CHECKING:
    from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import Qwen25VisionConfig

Seconds = Sequence[float | None]


class MergingTower(Protocol):
    """Configuration of a tower that merges patches."""

    @property
    def merge(self) -> int:
        """Patches along a side of a merge cell."""
        ...


class GridSpan(Protocol):
    """A run of placeholder tokens; ``core.media_spans.MediaSpan`` is one."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def grid(self) -> Grid: ...


def mrope_positions(
    length: int,
    spans: Sequence[GridSpan],
    tokens_per_second: float,
    merge: int = 2,
    second_per_grid: Sequence[float | None] | None = None,
) -> tuple[npt.NDArray[np.int32], int]:
    """Returns the positions of a whole prompt; computed once per request and sliced by absolute offset.

    Text counts up in all three axes. In a span the axes are the temporal patch, row and column of its merged grid,
    counted from the position at which the span starts; the text after it starts max(rows, columns) later.

    Args:
        length: tokens of the prompt, placeholders expanded.
        spans: by ascending offset, not overlapping; each has ``length`` t x h x w / merge^2.
        tokens_per_second: positions per second of video.
        merge: patches along a side of a merge cell.
        second_per_grid: per span, seconds from one temporal patch of a video to the next, None for an image.

    Returns:
        int32 [3, length], and the delta: the position of a later token is its index + delta.

    Raises:
        ValueError: a span overlaps another, exceeds the prompt, or has another length than its grid.
    """
    out = np.empty((3, length), np.int32)
    at = start = 0
    for i, span in enumerate(spans):
        t, h, w = span.grid[0], span.grid[1] // merge, span.grid[2] // merge
        if span.offset < at or span.length != t * h * w or span.offset + span.length > length:
            raise ValueError(f"span {i} (offset {span.offset}, length {span.length}, grid {span.grid}) does not fit")
        out[:, at : span.offset] = np.arange(start, start + span.offset - at, dtype=np.int32)
        start += span.offset - at
        seconds = second_per_grid[i] if second_per_grid else None
        # float32 as in the reference: a wider product could truncate to another integer.
        interval = np.float32(1) if seconds is None else np.float32(tokens_per_second) * np.float32(seconds)
        frames = (np.arange(t, dtype=np.float32) * interval).astype(np.int32)
        at = span.offset + span.length
        out[:, span.offset : at] = np.stack(np.meshgrid(frames, np.arange(h), np.arange(w), indexing="ij")).reshape(
            3, -1
        )
        out[:, span.offset : at] += start
        start += max(h, w)
    out[:, at:] = np.arange(start, start + length - at, dtype=np.int32)
    return out, (int(out.max()) + 1 - length) if length else 0


def mrope_positions_by_seconds(
    length: int, spans: Sequence[GridSpan], tower: Qwen25VisionConfig, seconds: Seconds
) -> tuple[npt.NDArray[np.int32], int]:
    """Returns Qwen2.5-VL's ``mrope_positions``: time counts seconds of a video."""
    return mrope_positions(length, spans, tower.tokens_per_second, tower.merge, seconds)


def mrope_positions_by_frames(
    length: int, spans: Sequence[GridSpan], tower: MergingTower, seconds: Seconds
) -> tuple[npt.NDArray[np.int32], int]:
    """Returns ``mrope_positions`` in which time counts temporal patches, whatever ``seconds`` lie between them."""
    return mrope_positions(length, spans, 1.0, tower.merge)
