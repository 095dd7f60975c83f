"""What image processors of tiles have in common: colours, cutting a tile into slots, options. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from trencadis.core.checkpoint.fields import Fields, read_json
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.multimodal.colours import CLIP, Colours
from trencadis.multimodal.grids import check_aspect
from trencadis.multimodal.images.decode import to_rgb
from trencadis.multimodal.images.limits import server_options, without_tiles
from trencadis.multimodal.options import MediaOptions
from trencadis.multimodal.processor import FILES, ImageOutline, Layout, Prepared, TakenRows
from trencadis.multimodal.tiles.config import CHANNELS, TileTower

UInt8 = npt.NDArray[np.uint8]
FIXED = "This model's pictures have sizes of its own; min_pixels, max_pixels and resized sizes do not apply."


@dataclass(frozen=True)
class TileProcessor(Colours, ABC):
    """``multimodal.processor.Processor`` of pictures that are tiles, each of ``image`` x ``image`` pixels.

    Args:
        image: pixels along a side of a tile.
        patch: pixels along a side of a patch; merge: patches along a side of a cell.
        slots: VISION slots of a tile.

    ``planes``: bytes of a value.
    """

    planes: ClassVar[int] = 1

    image: int = 0
    patch: int = 0
    merge: int = 1
    slots: int = 0
    kind: str = ""

    @property
    def values(self) -> int:
        """uint8 values of a patch."""
        return self.planes * CHANNELS * self.patch**2

    @property
    def cells(self) -> int:
        """Rows of a tile."""
        return (self.image // self.patch // self.merge) ** 2

    @property
    def fingerprint(self) -> str:
        """Every setting that changes the pixels."""
        return repr(self)

    @property
    def table(self) -> npt.NDArray[np.float32]:
        """float32 [3, 256]: the device's result for each channel and byte."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32)[:, None], np.array(self.std, np.float32)[:, None]
        return np.asarray((scaled[None] - mean) / std, np.float32)

    def with_options(self, options: MediaOptions, param: str | None = None) -> TileProcessor:
        """This processor; raises BadRequest for options that would resize a picture otherwise."""
        for name in ("min_pixels", "max_pixels", "resized_height", "resized_width"):
            if getattr(options, name) is not None:
                raise BadRequest(FIXED, param=f"{param}.{name}" if param else name)
        return self.with_tiles(options.num_crops, param or "")

    def with_tiles(self, tiles: int | None, param: str) -> TileProcessor:
        """This processor with a request's ``num_crops``; raises BadRequest where it does not apply."""
        without_tiles(tiles, param)
        return self

    @abstractmethod
    def outline(self, height: int, width: int) -> ImageOutline:
        """``sizes`` for any aspect ratio that is allowed."""

    @abstractmethod
    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        """uint8 [image, image, 3 x planes] each, of a picture in RGB that ``height`` x ``width`` stand for."""

    def sizes(self, height: int, width: int) -> ImageOutline:
        """What an image becomes; raises BadRequest for an aspect ratio above 200."""
        check_aspect(height, width)
        return self.outline(height, width)

    def outlined(
        self, resized: tuple[int, int], tiles: int, tokens: int, layout: Layout = (), area: int = 0
    ) -> ImageOutline:
        """An outline of ``tiles`` tiles and ``tokens`` placeholder tokens."""
        side = self.image // self.patch
        rows = self.cells if layout else 0
        area = max(area, resized[0] * resized[1], tiles * self.image**2)
        return ImageOutline(resized, (tiles, side, side), tokens, tiles * self.slots, area, rows, layout)

    def prepare(self, image: Image.Image, digest: str, original: tuple[int, int] | None = None) -> Prepared:
        """Resizes an upright image, takes its tiles and cuts them into patches."""
        if image.mode != "RGB":
            image = to_rgb(image)
        original = original or (image.height, image.width)
        made = self.sizes(*original)
        cut = np.concatenate([self.cut(tile) for tile in self.tiles(image, *original)])
        return made.prepared(cut, digest, original)

    def cut(self, tile: UInt8) -> UInt8:
        """uint8 [patches, values] of a tile, cell by cell, each by channel, row and column; edges without a cell go."""
        merge, patch, unit = self.merge, self.patch, self.patch * self.merge
        rows, columns = tile.shape[0] // unit, tile.shape[1] // unit
        whole = tile[: rows * unit, : columns * unit]
        grid = whole.reshape(rows, merge, patch, columns, merge, patch, tile.shape[-1])
        return np.ascontiguousarray(grid.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, self.values))


def whole_tiles(count: int, rows: int) -> tuple[TakenRows, ...]:
    """A layout of tiles one behind the other."""
    return tuple(TakenRows(i, 0, rows) for i in range(count))


def squares(image: Image.Image, side: int) -> list[UInt8]:
    """The squares of ``side`` pixels of a picture whose sides are multiples of it, row by row."""
    pixels, rows, columns = np.asarray(image), image.height // side, image.width // side
    cut = pixels.reshape(rows, side, columns, side, CHANNELS).transpose(0, 2, 1, 3, 4)
    return list(cut.reshape(rows * columns, side, side, CHANNELS))


def settings_file(path: Path) -> Fields:
    """The image processor's settings of a checkpoint; raises StartupError without a file, or without a size."""
    for where in (path / name for name in FILES):
        c = Fields(read_json(where) or {}, where)
        nested = c.given("image_processor")
        if nested or (where.name != FILES[0] and where.is_file()):  # the first may hold other parts alone
            found = c.within("image_processor") if nested else c
            if found.values.get("size", "") is None:
                found.refuse("size", "it must be an object")
            return found
    raise StartupError(f"{path} has neither preprocessor_config.json nor an image_processor in processor_config.json")


def has_settings(path: Path) -> bool:
    """Whether a checkpoint has an image processor's settings; without them there is no picture, only plans."""
    newer = read_json(path / FILES[0]) or {}
    return (path / FILES[1]).is_file() or newer.get("image_processor") is not None


def tower_of(config: ModelConfig) -> TileTower:
    """The tower's configuration."""
    assert isinstance(config.vision, TileTower)
    return config.vision


def check_options(asked: Mapping[str, Any], tiles: bool = False) -> int | None:
    """Refuses ``--mm-processor-kwargs`` that would change a picture's size or pixels; returns num_crops, if given.

    ``tiles``: whether num_crops applies.
    """
    given = server_options(asked)
    if given.pixels or given.checkpoint:
        name = next(iter({**given.pixels, **given.checkpoint}))
        raise StartupError(f"--mm-processor-kwargs: {name} does not apply, the pictures of this model have fixed sizes")
    if not tiles:
        without_tiles(given.tiles)
    return given.tiles


def shared_fields(v: TileTower, colours: Colours = CLIP) -> dict[str, Any]:
    """The fields of a ``TileProcessor`` that follow from the tower and the colours."""
    own = {f.name: getattr(colours, f.name) for f in fields(Colours)}
    return {**own, "image": v.image, "patch": v.patch, "merge": v.merge, "slots": v.tile}


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """Every item is one tile; the arena holds the largest picture's. Raises StartupError for other options."""
    check_options(asked)
    v = tower_of(config)
    return ImageNeeds(v.tile, v.tile, v.tokens * v.most_tiles, tile=v.tile)
