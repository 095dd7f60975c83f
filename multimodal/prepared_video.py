"""A prepared video: the engine encodes each temporal patch separately; only positions connect them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trencadis.core.media_spans import MediaSpan
from trencadis.multimodal.patch_packing import Grid
from trencadis.multimodal.processor import PreparedImage


@dataclass(frozen=True)
class PreparedVideo:
    """One video, ready for the vision tower.

    Args:
        digest: hex digest of its bytes and of the processing options.
        patches: one item per temporal patch, each with its own digest, so that equal frames share arena rows.
        indices: indices of the sampled frames, two per temporal patch.
        fps: rate of the sampled frames; it sets the time axis of their positions.
        seconds: seconds from one temporal patch to the next.
        frames: number of all frames of the video.
        rate: frame rate of the video itself.
    """

    digest: str
    patches: tuple[PreparedImage, ...]
    indices: tuple[int, ...]
    fps: float
    seconds: float
    frames: int
    rate: float = 1.0

    @property
    def grid(self) -> Grid:
        """Patches (t, h, w)."""
        return len(self.patches), self.patches[0].grid[1], self.patches[0].grid[2]

    @property
    def tokens(self) -> int:
        """Decoder tokens of all temporal patches."""
        return sum(p.tokens for p in self.patches)

    @property
    def resized(self) -> tuple[int, int]:
        """(height, width) of a frame in pixels as the model sees it."""
        return self.patches[0].resized

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(p.nbytes for p in self.patches) + 512


Media = PreparedImage | PreparedVideo
"""The prepared form of one content part."""


def encoder_items(media: Sequence[Media]) -> list[PreparedImage]:
    """Returns the items that the engine encodes one by one: images, tiles and temporal patches, in prompt order."""
    return [item for one in media for item in (one.patches if isinstance(one, PreparedVideo) else one.items or (one,))]


def position_spans(spans: Sequence[MediaSpan], media: Sequence[Media]) -> tuple[list[MediaSpan], list[float | None]]:
    """Returns the arguments of ``mrope_positions``: one span per image or video, and seconds between its temporal
    patches.

    Args:
        spans: one per item of ``encoder_items(media)``, in that order.

    Returns:
        Spans, and for each the seconds from one temporal patch to the next (None for an image).
    """
    whole: list[MediaSpan] = []
    seconds: list[float | None] = []
    at = 0
    for one in media:
        if isinstance(one, PreparedVideo):
            whole.append(MediaSpan(spans[at].offset, one.tokens, one.digest, one.grid, 0))
            seconds.append(one.seconds)
            at += len(one.patches)
        else:
            whole.append(spans[at])
            seconds.append(None)
            at += len(one.items) or 1
    return whole, seconds
