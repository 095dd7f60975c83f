"""LFM2-VL's image processor: a small image in its own shape; a large one as tiles of one size, and once more whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from PIL import Image

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.json_fields import JsonFields, read_json
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.lfm2_vl.config import Lfm2VisionConfig
from trencadis.multimodal.pixel_normalisation_and_fixed_point import (
    IMAGENET_STANDARD,
    PixelNormalisation,
    read_normalisation,
)
from trencadis.multimodal.processor_interface import PROCESSOR_FILES, ImageGeometry, Layout, PlaceholderRun
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    cut_squares,
    has_processor_settings,
    make_processor_functions,
    read_processor_settings,
)

PROCESSOR_TYPES = ("Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast")
BILINEAR = 2
BEGIN, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
MOST_TILES, MOST_TOKENS, MOST_SIDE = 64, 4096, 4096


Size = tuple[int, int]


@lru_cache(maxsize=1024)
def resize_whole(height: int, width: int, unit: int, least: int, most: int) -> Size:
    """Returns (height, width) of an image with whole cells of ``unit`` pixels and ``least`` to ``most`` of them."""
    rows, columns = (max(unit, round(side / unit) * unit) for side in (height, width))
    if rows * columns > most * unit**2:
        beta = math.sqrt(height * width / (most * unit**2))
        rows, columns = (max(unit, math.floor(side / beta / unit) * unit) for side in (height, width))
    elif rows * columns < least * unit**2:
        beta = math.sqrt(least * unit**2 / (height * width))
        rows, columns = (math.ceil(side * beta / unit) * unit for side in (height, width))
    return rows, columns


@lru_cache(maxsize=1024)
def choose_grid(height: int, width: int, tile: int, least: int, most: int) -> Size:
    """Returns (rows, columns) of ``least`` to ``most`` tiles whose aspect ratio is closest to an image's.

    Of equally close ones, the largest of which the image has more than half of the pixels, else the smallest.
    """
    sides = range(1, most + 1)
    grids = [(c, r) for c in sides for r in sides if least <= c * r <= most]
    best, closest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        off = abs(width / height - columns / rows)
        if off < closest or (off == closest and height * width > 0.5 * tile**2 * columns * rows):
            best, closest = (rows, columns), off
    return best


def layout_items(grid: Size, rows: int, thumbnail: int) -> Layout:
    """Returns the layout of an image: its tiles row by row, each after the token of its place, then the whole image.

    Args:
        rows: arena rows of a tile; ``thumbnail``: those of the whole image, 0: it is not shown.
    """
    layout, before = list[str | PlaceholderRun](), BEGIN
    for item in range(grid[0] * grid[1]):
        row, column = divmod(item, grid[1])
        layout += [f"{before}<|img_row_{row + 1}_col_{column + 1}|>", PlaceholderRun(item, 0, rows)]
        before = ""
    if thumbnail:
        layout += [THUMBNAIL, PlaceholderRun(grid[0] * grid[1], 0, thumbnail)]
    return *layout, END


@dataclass(frozen=True)
class Lfm2VlImageProcessor(TileImageProcessor):
    """``multimodal.processor_interface.Processor`` of tiles of ``image`` pixels along a side, and of whole images.

    Args:
        least_tiles, most_tiles: number of tiles of an image that is cut; 1 at most: none is cut.
        least_tokens, most_tokens: number of cells of an image that is not cut, and of a thumbnail.
        tolerance: an image of more than ``most_tokens`` times this is cut.
        thumbnail: True if an image that is cut is also shown whole.
    """

    least_tiles: int = 2
    most_tiles: int = 10
    least_tokens: int = 64
    most_tokens: int = 256
    tolerance: float = 2.0
    thumbnail: bool = True
    kind: str = "trencadis.multimodal.lfm2_vl.processor:Lfm2VlImageProcessor"

    @property
    def unit(self) -> int:
        """Pixels along a side of a cell."""
        return self.patch * self.merge

    @property
    def most_whole(self) -> int:
        """Number of cells of the largest item."""
        return max(self.most_tokens, self.rows_per_tile if self.most_tiles > 1 else 0)

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        if not self._is_large(height, width):
            whole = self._whole_geometry(height, width)
            plain = (BEGIN, PlaceholderRun(0, 0, whole.tokens), END)
            return whole._replace(area=max(height * width, whole.area), rows=whole.tokens, layout=plain)
        grid = choose_grid(height, width, self.image, self.least_tiles, self.most_tiles)
        last = (self._whole_geometry(height, width),) if self.thumbnail else ()
        count, side, rows = grid[0] * grid[1], self.image // self.patch, self.rows_per_tile
        resized = (grid[0] * self.image, grid[1] * self.image)
        area = max(height * width, resized[0] * resized[1] + sum(one.area for one in last))
        parts = (ImageGeometry(resized, (1, side, side), rows, self.slots, area),) * count + last
        return ImageGeometry(
            resized, (count, side, side), sum(one.tokens for one in parts), sum(one.slots for one in parts), area, rows,
            layout_items(grid, rows, sum(one.tokens for one in last)), parts,
        )  # fmt: skip

    def _is_large(self, height: int, width: int) -> bool:
        """Returns True if an image is cut."""
        rows, columns = (max(self.patch, round(side / self.unit) * self.unit) for side in (height, width))
        return self.most_tiles > 1 and rows * columns > self.most_tokens * self.unit**2 * self.tolerance

    def _whole_geometry(self, height: int, width: int) -> ImageGeometry:
        """Returns the geometry of an image that is not cut, or of a thumbnail."""
        rows, columns = resize_whole(height, width, self.unit, self.least_tokens, self.most_tokens)
        patches = rows * columns // self.patch**2
        if patches > self.most_whole * self.merge**2:  # the limits alone do not bound a long image
            raise BadRequest(f"An image of {width} x {height} pixels is too long for this model.")
        grid = (1, rows // self.patch, columns // self.patch)
        slots = align_up(patches, WINDOW_SLOTS)
        return ImageGeometry((rows, columns), grid, patches // self.merge**2, slots, rows * columns)

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        made = self.compute_tile_geometry(height, width)
        if not self._is_large(height, width):
            return [np.asarray(_resize(image, made.resized))]
        tiles = cut_squares(_resize(image, made.resized), self.image)
        return [*tiles, *(np.asarray(_resize(image, one.resized)) for one in made.parts[len(tiles) :])]


def _resize(image: Image.Image, size: Size) -> Image.Image:
    """Returns an image of ``size``, (height, width)."""
    return image if image.size == size[::-1] else image.resize(size[::-1], Image.Resampling.BILINEAR)


def _read_limits(c: JsonFields, v: Lfm2VisionConfig) -> JsonObject:
    """Reads the processor's own fields; raises StartupError for values that the tower cannot take."""
    least = -(-v.side // v.merge)
    c.only("image_processor_type", PROCESSOR_TYPES, PROCESSOR_TYPES[0])
    for key in ("do_resize", "do_pad"):
        c.only(key, (True,), True)
    c.only("resample", (BILINEAR,), BILINEAR)
    c.only("encoder_patch_size", (v.patch,), 16)
    c.only("downsample_factor", (v.merge,), 2)
    split = c.boolean("do_image_splitting", True)
    tile = c.integer("tile_size", v.unit, MOST_SIDE, 512)
    if tile % v.unit or tile // v.patch < v.side:
        c.refuse("tile_size", f"it must be a multiple of {v.unit} of at least {v.side * v.patch} pixels")
    tokens = c.integer("min_image_tokens", least**2, MOST_TOKENS, 64)
    tiles = c.integer("min_tiles", 2 if split else 1, MOST_TILES, 2)
    most = c.integer("max_tiles", tiles, MOST_TILES, 10)
    return {
        "image": tile, "least_tiles": tiles if split else 1, "most_tiles": most if split else 1,
        "least_tokens": tokens, "most_tokens": c.integer("max_image_tokens", tokens, MOST_TOKENS, 256),
        "tolerance": c.number("max_pixels_tolerance", 0, 1e6, 2.0, above=True),
        "thumbnail": c.boolean("use_thumbnail", True),
    }  # fmt: skip


def _build_processor(config: ModelConfig, mm_kwargs: JsonMapping) -> Lfm2VlImageProcessor:
    """Creates the processor; without a file that of the class, for plans."""
    check_processor_kwargs(mm_kwargs)
    v, normalisation = config.vision, load_normalisation(config)
    assert isinstance(v, Lfm2VisionConfig)
    found: JsonObject = {"image": 512}
    if has_processor_settings(config.path):
        found = _read_limits(read_processor_settings(config.path), v)
        where = config.path / PROCESSOR_FILES[0]
        JsonFields(read_json(where) or {}, where).only("use_image_special_tokens", (True,), True)
    own = {f.name: getattr(normalisation, f.name) for f in fields(PixelNormalisation)}
    slots = align_up((found["image"] // v.patch) ** 2, WINDOW_SLOTS)
    return Lfm2VlImageProcessor(**own, **found, patch=v.patch, merge=v.merge, slots=slots)


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns slots of the largest and of the smallest item, and rows of the image with most tiles."""
    made = _build_processor(config, mm_kwargs)
    largest, least = (align_up(n * made.merge**2, WINDOW_SLOTS) for n in (made.most_whole, made.least_tokens))
    tiles = made.most_tiles * made.rows_per_tile if made.most_tiles > 1 else 0
    return ImageNeeds(largest, least, tiles + made.most_whole)


def load_normalisation(config: ModelConfig) -> PixelNormalisation:
    """Reads how a checkpoint's processor normalises pixels."""
    if not has_processor_settings(config.path):
        return IMAGENET_STANDARD
    return read_normalisation(read_processor_settings(config.path), IMAGENET_STANDARD)


from_checkpoint, image_sizes = make_processor_functions(_build_processor)
