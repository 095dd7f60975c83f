"""Phi-3-V's image processor: cuts an image into up to ``num_crops`` tiles and adds the whole image, downscaled, as
one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import ClassVar

import numpy as np
from PIL import Image

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.phi3_v.family import NEWLINE, SEPARATOR, Phi3VVisionConfig
from trencadis.multimodal.pixel_normalisation_and_fixed_point import (
    CLIP,
    downscale_bicubic,
    encode_bytes,
    encode_fixed_point,
    read_normalisation,
)
from trencadis.multimodal.processor_interface import ImageGeometry, Layout, PlaceholderRun
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    cut_squares,
    get_vision_config,
    has_processor_settings,
    make_processor_functions,
    read_processor_settings,
    shared_processor_fields,
)

PROCESSOR_TYPE = "Phi3VImageProcessor"
DEFAULT_NUM_CROPS, MAX_NUM_CROPS = 4, 64
WHITE = (255, 255, 255)

Size = tuple[int, int]


@dataclass(frozen=True)
class Phi3VImageProcessor(TileImageProcessor):
    """``multimodal.processor_interface.Processor`` of an image's tiles and the whole image.

    ``num_crops``: maximum number of tiles without the latter.
    """

    num_crops: int = DEFAULT_NUM_CROPS
    kind: str = "trencadis.multimodal.phi3_v.processor:Phi3VImageProcessor"
    bytes_per_value: ClassVar[int] = Phi3VVisionConfig.bytes_per_value

    def with_num_crops(self, tiles: int | None, param: str) -> Phi3VImageProcessor:
        if tiles is None:
            return self
        if tiles > self.num_crops:
            where = f"{param}.num_crops" if param else "num_crops"
            raise BadRequest(f"num_crops={tiles} is above this server's {self.num_crops}.", param=where)
        return replace(self, num_crops=tiles)

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        rows, columns = (align_up(side, self.image) for side in self.fit_to_crops(height, width))
        grid = rows // self.image, columns // self.image
        layout = layout_crops(grid, self.image // self.patch // self.merge)
        tokens = sum(piece.tokens for piece in layout if isinstance(piece, PlaceholderRun))
        tiles = grid[0] * grid[1] + 1
        # The area counts all bytes of a value, since bounds on workers' memory and replies assume pixels of three
        # bytes.
        return self.make_geometry((rows, columns), tiles, tokens, layout, self.bytes_per_value * tiles * self.image**2)

    def fit_to_crops(self, height: int, width: int) -> Size:
        """Returns (height, width) to which an image is resized: as many whole tiles along its longer side as fit."""
        ratio, across = max(height, width) / min(height, width), 1
        while (across + 1) * ceil((across + 1) / ratio) <= self.num_crops:
            across += 1
        longer = across * self.image
        shorter = int(longer / ratio)
        return (shorter, longer) if width >= height else (longer, shorter)

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        """Cuts an image into tiles and adds the whole image.

        A portrait image is transposed before resizing and back afterwards, since rounding depends on the order of axes.
        """
        rows, columns = self.fit_to_crops(height, width)
        if upright := width < height:
            image, rows, columns = image.transpose(Image.Transpose.TRANSPOSE), columns, rows
        canvas = Image.new("RGB", (columns, align_up(rows, self.image)), WHITE)
        above = (canvas.height - rows) // 2
        canvas.paste(image.resize((columns, rows), Image.Resampling.BILINEAR), (0, above))
        if upright:
            canvas = canvas.transpose(Image.Transpose.TRANSPOSE)
        whole = downscale_bicubic(np.asarray(canvas), self.image)
        return [
            *map(encode_bytes, cut_squares(canvas, self.image)),
            encode_fixed_point(whole),
        ]


@lru_cache(maxsize=256)
def layout_crops(grid: Size, side: int) -> Layout:
    """Returns the layout of an image: its tiles line by line, a newline row after each; a separator; the whole image in
    the same way.

    ``grid``: number of rows and columns of tiles; ``side``: cells along a side of a tile.
    """
    whole = grid[0] * grid[1]
    layout: list[str | PlaceholderRun] = []
    for line in range(grid[0] * side):
        first, at = line // side * grid[1], line % side * side
        layout += [PlaceholderRun(first + column, at, side) for column in range(grid[1])]
        layout.append(PlaceholderRun(first + grid[1] - 1, 0, 1, NEWLINE))
    layout.append(PlaceholderRun(whole, 0, 1, SEPARATOR))
    for line in range(side):
        layout += [PlaceholderRun(whole, line * side, side), PlaceholderRun(whole, 0, 1, NEWLINE)]
    return tuple(layout)


def load_processor(config: ModelConfig, mm_kwargs: JsonMapping) -> Phi3VImageProcessor:
    """Creates the processor of a checkpoint folder.

    Without a processor file it is that of the published checkpoint, for planning.
    """
    v, given = get_vision_config(config), check_processor_kwargs(mm_kwargs, tiles=True)
    normalisation, crops = CLIP, DEFAULT_NUM_CROPS
    if has_processor_settings(config.path):
        c = read_processor_settings(config.path)
        c.only("image_processor_type", (PROCESSOR_TYPE,), PROCESSOR_TYPE)
        for key in ("do_convert_rgb", "do_rescale", "do_normalize"):
            c.only(key, (True,), True)
        c.only("num_img_tokens", (v.rows_per_tile,), v.rows_per_tile)
        normalisation, crops = read_normalisation(c), c.integer("num_crops", most=MAX_NUM_CROPS, default=1)
    if given is not None and given > MAX_NUM_CROPS:
        raise StartupError(f"--mm-processor-kwargs: num_crops={given} is above {MAX_NUM_CROPS}")
    return Phi3VImageProcessor(**shared_processor_fields(v, normalisation), num_crops=crops if given is None else given)


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns slots and arena rows of an image: every item is one tile; the arena rows are the largest image's."""
    v = get_vision_config(config)
    return ImageNeeds(
        v.slots_per_tile,
        v.slots_per_tile,
        v.rows_per_tile * (1 + load_processor(config, mm_kwargs).num_crops),
        tile=v.slots_per_tile,
    )


from_checkpoint, image_sizes = make_processor_functions(load_processor)
