"""Shared by image processors of tiles: pixel normalisation, cutting a tile into slots, options. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from trencadis.core.checkpoint.json_fields import JsonFields, read_json
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.multimodal.convert_to_rgb import to_rgb
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions, refuse_num_crops, server_options
from trencadis.multimodal.patch_packing import check_aspect
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP, PixelNormalisation
from trencadis.multimodal.processor_interface import (
    PROCESSOR_FILES,
    ImageGeometry,
    Layout,
    PlaceholderRun,
    PreparedImage,
)
from trencadis.multimodal.vit.tile_vision_config import CHANNELS, TileVisionConfig

UInt8 = npt.NDArray[np.uint8]
FIXED_SIZE_MESSAGE = "This model's images have sizes of its own; min_pixels, max_pixels and resized sizes do not apply."


@dataclass(frozen=True)
class TileImageProcessor(PixelNormalisation, ABC):
    """``multimodal.processor_interface.Processor`` of images that are tiles, each of ``image`` x ``image`` pixels.

    Args:
        image: pixels along a side of a tile.
        patch: pixels along a side of a patch; merge: patches along a side of a cell.
        slots: VISION slots of a tile.

    ``bytes_per_value``: bytes of a value.
    """

    bytes_per_value: ClassVar[int] = 1

    image: int = 0
    patch: int = 0
    merge: int = 1
    slots: int = 0
    kind: str = ""

    @property
    def values(self) -> int:
        """Number of uint8 values of a patch."""
        return self.bytes_per_value * CHANNELS * self.patch**2

    @property
    def rows_per_tile(self) -> int:
        """Arena rows of a tile."""
        return (self.image // self.patch // self.merge) ** 2

    @property
    def fingerprint(self) -> str:
        """Every setting that changes the pixels."""
        return repr(self)

    @property
    def normalised_values(self) -> npt.NDArray[np.float32]:
        """Result on the device for each channel and byte, float32 [3, 256]."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32)[:, None], np.array(self.std, np.float32)[:, None]
        return np.asarray((scaled[None] - mean) / std, np.float32)

    def with_options(self, options: MediaOptions, param: str | None = None) -> TileImageProcessor:
        """Returns this processor with a request's options.

        Raises BadRequest for options that would change the size of an image.
        """
        for name in ("min_pixels", "max_pixels", "resized_height", "resized_width"):
            if getattr(options, name) is not None:
                raise BadRequest(FIXED_SIZE_MESSAGE, param=f"{param}.{name}" if param else name)
        return self.with_num_crops(options.num_crops, param or "")

    def with_num_crops(self, tiles: int | None, param: str) -> TileImageProcessor:
        """Returns this processor with a request's ``num_crops``; raises BadRequest if it does not apply."""
        refuse_num_crops(tiles, param)
        return self

    @abstractmethod
    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        """Returns the geometry of an image whose aspect ratio has been checked."""

    @abstractmethod
    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        """Returns the tiles, uint8 [image, image, 3 x bytes_per_value] each, of an RGB image whose file has
        ``height`` x ``width`` pixels.
        """

    def compute_geometry(self, height: int, width: int) -> ImageGeometry:
        """Returns the geometry of an image; raises BadRequest for an aspect ratio above 200."""
        check_aspect(height, width)
        return self.compute_tile_geometry(height, width)

    def make_geometry(
        self, resized: tuple[int, int], tiles: int, tokens: int, layout: Layout = (), area: int = 0
    ) -> ImageGeometry:
        """Builds the geometry of ``tiles`` tiles and ``tokens`` placeholder tokens."""
        side = self.image // self.patch
        rows = self.rows_per_tile if layout else 0
        area = max(area, resized[0] * resized[1], tiles * self.image**2)
        return ImageGeometry(resized, (tiles, side, side), tokens, tiles * self.slots, area, rows, layout)

    def prepare(self, image: Image.Image, digest: str, original: tuple[int, int] | None = None) -> PreparedImage:
        """Resizes an upright image, takes its tiles and cuts them into patches."""
        if image.mode != "RGB":
            image = to_rgb(image)
        original = original or (image.height, image.width)
        made = self.compute_geometry(*original)
        cut = np.concatenate([self.cut_patches(tile) for tile in self.cut_tiles(image, *original)])
        return made.make_prepared(cut, digest, original)

    def cut_patches(self, tile: UInt8) -> UInt8:
        """Returns the patches of a tile, uint8 [patches, values], cell by cell, each by channel, row and column.

        Pixels at the edges that fill no cell are dropped.
        """
        merge, patch, unit = self.merge, self.patch, self.patch * self.merge
        rows, columns = tile.shape[0] // unit, tile.shape[1] // unit
        whole = tile[: rows * unit, : columns * unit]
        grid = whole.reshape(rows, merge, patch, columns, merge, patch, tile.shape[-1])
        return np.ascontiguousarray(grid.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, self.values))


def layout_tiles(count: int, rows: int) -> tuple[PlaceholderRun, ...]:
    """Returns the layout of ``count`` tiles one after the other, without text between them."""
    return tuple(PlaceholderRun(i, 0, rows) for i in range(count))


def cut_squares(image: Image.Image, side: int) -> list[UInt8]:
    """Returns the squares of ``side`` pixels of an image whose sides are multiples of it, row by row."""
    pixels, rows, columns = np.asarray(image), image.height // side, image.width // side
    cut = pixels.reshape(rows, side, columns, side, CHANNELS).transpose(0, 2, 1, 3, 4)
    return list(cut.reshape(rows * columns, side, side, CHANNELS))


def read_processor_settings(path: Path) -> JsonFields:
    """Reads the image processor's settings of a checkpoint.

    Raises StartupError without a file or if its size is null.
    """
    for where in (path / name for name in PROCESSOR_FILES):
        c = JsonFields(read_json(where) or {}, where)
        nested = c.is_given("image_processor")
        if nested or (where.name != PROCESSOR_FILES[0] and where.is_file()):  # the first may hold other parts alone
            found = c.within("image_processor") if nested else c
            if found.values.get("size", "") is None:
                found.refuse("size", "it must be an object")
            return found
    raise StartupError(f"{path} has neither preprocessor_config.json nor an image_processor in processor_config.json")


def has_processor_settings(path: Path) -> bool:
    """Returns True if a checkpoint has an image processor's settings.

    Without them it can be planned for, but takes no images.
    """
    newer = read_json(path / PROCESSOR_FILES[0]) or {}
    return (path / PROCESSOR_FILES[1]).is_file() or newer.get("image_processor") is not None


class ProcessorFunctions(NamedTuple):
    """A family's functions that ``VisionSide.processor`` and ``VisionSide.sizes`` name."""

    from_checkpoint: Callable[..., TileImageProcessor]
    image_sizes: Callable[..., Callable[..., ImageGeometry]]


def make_processor_functions(build: Callable[[ModelConfig, JsonMapping], TileImageProcessor]) -> ProcessorFunctions:
    """Returns the two functions of a family.

    Args:
        build: (ModelConfig, ``--mm-processor-kwargs``) -> the processor; without a processor's file one for planning.
            Raises StartupError for unsupported settings.
    """

    def from_checkpoint(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> TileImageProcessor:
        """Creates the processor of a checkpoint folder; raises StartupError if it has no processor's file."""
        read_processor_settings(config.path)
        return build(config, mm_kwargs)

    def image_sizes(
        config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad"
    ) -> Callable[..., ImageGeometry]:
        """Returns a function that computes an image's geometry from its height and width."""
        return build(config, mm_kwargs).compute_geometry

    return ProcessorFunctions(from_checkpoint, image_sizes)


def get_vision_config(config: ModelConfig) -> TileVisionConfig:
    """Returns the tower's configuration."""
    assert isinstance(config.vision, TileVisionConfig)
    return config.vision


def check_processor_kwargs(mm_kwargs: JsonMapping, tiles: bool = False) -> int | None:
    """Refuses ``--mm-processor-kwargs`` that would change an image's size or pixels; returns num_crops, if given.

    ``tiles``: True if num_crops applies.
    """
    given = server_options(mm_kwargs)
    if given.pixels or given.checkpoint:
        name = next(iter({**given.pixels, **given.checkpoint}))
        raise StartupError(f"--mm-processor-kwargs: {name} does not apply, the images of this model have fixed sizes")
    if not tiles:
        refuse_num_crops(given.tiles)
    return given.tiles


def shared_processor_fields(v: TileVisionConfig, normalisation: PixelNormalisation = CLIP) -> JsonObject:
    """Returns the fields of a ``TileImageProcessor`` that follow from the tower and the pixel normalisation."""
    own = {f.name: getattr(normalisation, f.name) for f in fields(PixelNormalisation)}
    return {**own, "image": v.image, "patch": v.patch, "merge": v.merge, "slots": v.slots_per_tile}


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns slots and arena rows of an image: every item is one tile; the arena rows are the largest image's.

    Raises StartupError for options that do not apply.
    """
    check_processor_kwargs(mm_kwargs)
    v = get_vision_config(config)
    return ImageNeeds(v.slots_per_tile, v.slots_per_tile, v.rows_per_tile * v.max_tiles, tile=v.slots_per_tile)
