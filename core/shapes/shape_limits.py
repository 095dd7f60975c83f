"""Limits of an engine's launch shapes, and which buckets of a grid can occur. Pure Python.

The *cell* of a bucket holds the needs above its lower neighbour and up to itself in every axis. A bucket is kept if any
need of its cell can occur. Limits are monotonic, so that one corner of the cell decides: the smallest need if the limit
bounds a sum or product (rows x tokens, tokens + context), the largest on an axis with which the limit grows (blocks <=
rows x blocks of one row).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trencadis.core.buckets import DRAFTED_ROWS, ENCODER_SLOTS
from trencadis.core.checkpoint.model_config import SquareImage
from trencadis.core.device_shape_policy import LARGEST
from trencadis.core.vision_config import WINDOW_SLOTS


@dataclass(frozen=True)
class ShapeLimits:
    """The limits of an engine's shapes.

    Args:
        max_rows: most requests in one step.
        max_tokens: most tokens in one step.
        max_model_len: most tokens of one request, prompt plus answer.
        block_size: tokens of a KV block.
        image_slots: slots of the largest image; 0: no vision tower.
        least_slots: slots of the smallest image.
        image_tile: slots of every image if all are equal; 0: they differ.
        squares: the smallest square image for each number of slots.
        encoder_slots: most slots of a launch of several images.
        images: (slots of one, fewest, most at a time) of images that get their own buckets.
        units: most images that tokens of one launch may attend to (cross-attention).
        drafts: most drafts of a row; 0: nothing is drafted.
        adapters: slots of LoRA adapters; 0: no launch has adapters.
        wide: variants of SAMPLE that report more ids than a launch which draws.
    """

    max_rows: int
    max_tokens: int
    max_model_len: int
    block_size: int
    image_slots: int = 0
    least_slots: int = WINDOW_SLOTS
    image_tile: int = 0
    squares: tuple[SquareImage, ...] = ()
    encoder_slots: int = ENCODER_SLOTS
    images: tuple[tuple[int, int, int], ...] = ()
    units: int = 0
    adapters: int = 0
    drafts: int = 0
    wide: tuple[str, ...] = ()

    @property
    def sampled_rows(self) -> int:
        """Most rows of SAMPLE: one for each sequence, and one for each of its drafts in small batches."""
        return max(self.max_rows, min(self.max_rows * (self.drafts + 1), DRAFTED_ROWS))

    @property
    def verified_rows(self) -> int:
        """Rows of the largest launch that verifies drafts: those that have as many as possible in one step."""
        width = self.drafts + 1
        return max(min(self.sampled_rows, self.max_tokens) // width, 1)

    @property
    def chunk(self) -> int:
        """Most tokens of one row in a step."""
        return min(self.max_tokens, self.max_model_len)

    @property
    def row_blocks(self) -> int:
        """Blocks of one full-length row."""
        return -(-self.max_model_len // self.block_size)

    @property
    def context_blocks(self) -> int:
        """Blocks before the last token of a full-length row, at least 1."""
        return max(-(-(self.max_model_len - 1) // self.block_size), 1)

    @property
    def launch_slots(self) -> int:
        """Most slots that the images of one step need."""
        return max(self.image_slots, self.encoder_slots) if self.image_slots else 0

    def fresh(self, rows: int, tokens: int) -> bool:
        """Returns True if one step can start ``rows`` prompts of ``tokens`` tokens each."""
        return rows <= self.max_rows and tokens <= self.max_model_len and rows * tokens <= self.max_tokens

    def context(self, tokens: int, blocks: int) -> bool:
        """Returns True if ``tokens`` tokens can follow a context of ``blocks`` blocks."""
        held = (blocks - 1) * self.block_size + 1
        return blocks > 0 and tokens <= self.max_tokens and tokens + held <= self.max_model_len

    def decode(self, rows: int, blocks: int) -> bool:
        """Returns True if ``rows`` rows can hold ``blocks`` blocks together."""
        return rows <= min(self.max_rows, blocks) and blocks <= rows * self.row_blocks


def cells(
    axes: Sequence[Sequence[int]], corners: Sequence[str], occurs: Callable[[tuple[int, ...]], bool]
) -> Iterator[tuple[int, ...]]:
    """Yields the dims of the grid's buckets that are kept: those for whose corner ``occurs`` is true."""
    for index in itertools.product(*(range(len(a)) for a in axes)):
        dims = tuple(axis[i] for axis, i in zip(axes, index, strict=True))
        lower = (axis[i - 1] if i else 0 for axis, i in zip(axes, index, strict=True))
        corner = (d if c == LARGEST else low + 1 for d, low, c in zip(dims, lower, corners, strict=True))
        if occurs(tuple(corner)):
            yield dims
