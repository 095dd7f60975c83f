"""Configuration of LLaVA-NeXT's CLIP tower over tiles, with the grids of tiles that an image may have. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.llava.config import ClipVisionConfig

MAX_TILES = 64
DEFAULT_GRID_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
NEWLINE = 0
"""Number of the only constant row."""

Size = tuple[int, int]


@dataclass(frozen=True)
class LlavaNextVisionConfig(ClipVisionConfig):
    """CLIP's tower over tiles.

    ``grid_pinpoints``: sizes (height, width) in pixels to which an image may be resized before it is cut into tiles.
    """

    grid_pinpoints: tuple[Size, ...] = ()
    constants: ClassVar[int] = 1

    @property
    def max_tiles(self) -> int:
        """Number of tiles of the largest grid, plus one for the whole image."""
        return 1 + max(h * w for h, w in self.grid_pinpoints) // self.image**2


def read_grid_pinpoints(c: JsonFields, image: int) -> tuple[Size, ...]:
    """Reads ``image_grid_pinpoints``; raises StartupError for sizes that are not whole tiles, or too many of them."""
    key, found = "image_grid_pinpoints", []
    given = c.values.get(key) if c.is_given(key) else [*map(list, DEFAULT_GRID_PINPOINTS)]
    for pair in given if isinstance(given, list) else [None]:
        sides = (
            JsonFields({"pair": pair}, c.where).integers("pair", image, length=2) if isinstance(pair, list) else (1, 1)
        )
        if any(side % image for side in sides) or sides[0] * sides[1] > MAX_TILES * image**2:
            c.refuse(key, f"it must be pairs of multiples of {image}, of {MAX_TILES} tiles at most")
        found.append((sides[0], sides[1]))
    if not found or len(found) > MAX_TILES:
        c.refuse(key, f"it must have 1 to {MAX_TILES} pairs")
    return tuple(found)
