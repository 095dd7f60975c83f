"""Phi-3-V's image processor: a picture cut into up to ``num_crops`` tiles, and the whole of it as one more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.layout import aligned
from trencadis.multimodal.colours import CLIP, read_colours
from trencadis.multimodal.phi3_v.family import NEWLINE, SEPARATOR, CropTower
from trencadis.multimodal.processor import ImageOutline, Layout, TakenRows
from trencadis.multimodal.tiles import fine
from trencadis.multimodal.tiles.processor import (
    TileProcessor,
    UInt8,
    check_options,
    has_settings,
    settings_file,
    shared_fields,
    squares,
    tower_of,
)

KIND = "Phi3VImageProcessor"
CROPS, MOST_CROPS = 4, 64
WHITE = (255, 255, 255)

Size = tuple[int, int]


@dataclass(frozen=True)
class CropProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of a picture's tiles and the whole; ``crops``: most tiles of the former."""

    crops: int = CROPS
    kind: str = "trencadis.multimodal.phi3_v.processor:CropProcessor"
    planes: ClassVar[int] = CropTower.planes

    def with_tiles(self, tiles: int | None, param: str) -> CropProcessor:
        if tiles is None:
            return self
        if tiles > self.crops:
            where = f"{param}.num_crops" if param else "num_crops"
            raise BadRequest(f"num_crops={tiles} is above this server's {self.crops}.", param=where)
        return replace(self, crops=tiles)

    def outline(self, height: int, width: int) -> ImageOutline:
        rows, columns = (aligned(side, self.image) for side in self.fitted(height, width))
        grid = rows // self.image, columns // self.image
        layout = lines(grid, self.image // self.patch // self.merge)
        tokens = sum(piece.tokens for piece in layout if isinstance(piece, TakenRows))
        tiles = grid[0] * grid[1] + 1
        # Bytes count, since memory and replies of workers are bounded by pixels of three bytes.
        return self.outlined((rows, columns), tiles, tokens, layout, self.planes * tiles * self.image**2)

    def fitted(self, height: int, width: int) -> Size:
        """(height, width) to which a picture is resized: as many whole tiles along its longer side as fit."""
        ratio, across = max(height, width) / min(height, width), 1
        while (across + 1) * ceil((across + 1) / ratio) <= self.crops:
            across += 1
        longer = across * self.image
        shorter = int(longer / ratio)
        return (shorter, longer) if width >= height else (longer, shorter)

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        """An upright picture is turned on its side, and back when it is done: rounding depends on the order of axes."""
        rows, columns = self.fitted(height, width)
        if upright := width < height:
            image, rows, columns = image.transpose(Image.Transpose.TRANSPOSE), columns, rows
        canvas = Image.new("RGB", (columns, aligned(rows, self.image)), WHITE)
        above = (canvas.height - rows) // 2
        canvas.paste(image.resize((columns, rows), Image.Resampling.BILINEAR), (0, above))
        if upright:
            canvas = canvas.transpose(Image.Transpose.TRANSPOSE)
        whole = fine.shrunk(np.asarray(canvas), self.image)
        return [*map(fine.coarse, squares(canvas, self.image)), fine.fine(whole)]


@lru_cache(maxsize=256)
def lines(grid: Size, side: int) -> Layout:
    """Tiles line by line, each line with its end; a separator; the whole picture in the same way.

    ``grid``: rows and columns of tiles; ``side``: cells along a side of a tile.
    """
    whole = grid[0] * grid[1]
    layout: list[str | TakenRows] = []
    for line in range(grid[0] * side):
        first, at = line // side * grid[1], line % side * side
        layout += [TakenRows(first + column, at, side) for column in range(grid[1])]
        layout.append(TakenRows(first + grid[1] - 1, 0, 1, NEWLINE))
    layout.append(TakenRows(whole, 0, 1, SEPARATOR))
    for line in range(side):
        layout += [TakenRows(whole, line * side, side), TakenRows(whole, 0, 1, NEWLINE)]
    return tuple(layout)


def settings(config: ModelConfig, asked: Mapping[str, Any]) -> CropProcessor:
    """The processor of a checkpoint folder; without a file that of the published one, for plans."""
    v, given = tower_of(config), check_options(asked, tiles=True)
    colours, crops = CLIP, CROPS
    if has_settings(config.path):
        c = settings_file(config.path)
        c.only("image_processor_type", (KIND,), KIND)
        for key in ("do_convert_rgb", "do_rescale", "do_normalize"):
            c.only(key, (True,), True)
        c.only("num_img_tokens", (v.tokens,), v.tokens)
        colours, crops = read_colours(c), c.integer("num_crops", most=MOST_CROPS, default=1)
    if given is not None and given > MOST_CROPS:
        raise StartupError(f"--mm-processor-kwargs: num_crops={given} is above {MOST_CROPS}")
    return CropProcessor(**shared_fields(v, colours), crops=crops if given is None else given)


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """Every item is one tile; the arena holds the largest picture's."""
    v = tower_of(config)
    return ImageNeeds(v.tile, v.tile, v.tokens * (1 + settings(config, asked).crops), tile=v.tile)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> CropProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    settings_file(config.path)
    return settings(config, asked)


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    return settings(config, asked).sizes
