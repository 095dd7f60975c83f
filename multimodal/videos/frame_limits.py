"""Limits of a video's frames, as the checkpoint and the operator set them: pixels, slots, tokens, and the rule by which
frames are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.multimodal.patch_packing import MERGE, PATCH, Grid, count_slots, count_tokens, patch_grid

FRAME_TOKENS = (128, 768)
"""Default minimum and maximum tokens of a temporal patch."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Limits of one frame after resizing, as the checkpoint and the operator set them for images.

    Args:
        least: minimum pixels.
        most: maximum pixels.
        factor: pixels of which sides are multiples.
        cell: pixels along the side of a merge cell of ``MERGE`` x ``MERGE`` patches, which becomes one token.
        slots: VISION slots of the largest image that the server planned for.
        tokens: decoder tokens of that image.
    """

    least: int = 3136
    most: int = 12_845_056
    factor: int = PATCH * MERGE
    cell: int = PATCH * MERGE
    slots: int = 1 << 30
    tokens: int = 1 << 30
    windows: bool = True
    """True if the tower's slots stand in windows of 8 x 8 patches."""
    clip: tuple[int, int] | None = None
    """Minimum and maximum pixels of all frames together, if the model's own video processor sets them, which then
    also chooses frames (``frame_sampling.sample_clip_frames``); None: qwen-vl-utils' rules.
    """
    rule: str = ""
    """With ``clip``: the rule by which frames are chosen, a key of ``frame_sampling.CLIP_RULES``; "": they are evenly
    spaced.
    """

    @property
    def patch(self) -> int:
        """Pixels along the side of a patch."""
        return self.cell // MERGE

    def grid(self, size: tuple[int, int]) -> Grid:
        """Returns the patches of a frame of ``size`` (height, width) pixels."""
        return patch_grid(*size, self.patch)

    def fits(self, grid: Grid) -> bool:
        """Returns True if a frame of ``grid`` is within what the server planned for."""
        return count_slots(grid, self.windows) <= self.slots and count_tokens(grid) <= self.tokens

    @property
    def defaults(self) -> tuple[int, int]:
        """Default (minimum, maximum) pixels of a frame."""
        least, most = (tokens * self.cell**2 for tokens in FRAME_TOKENS)
        # A checkpoint whose largest image is below qwen-vl-utils' smallest frame has the limits of images for frames.
        return (least if least <= self.most else self.least), min(most, self.most)
