"""MiniCPM-V 4.6's image processor: a small whole image, and slices of a larger one in a grid of its aspect ratio. Both
have sides of whole cells and about as many pixels as a square of 448.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from PIL import Image

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.core.media_spans import MediaSpan
from trencadis.core.step import Int32
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.minicpmv4_6.config import SIDE, MiniCPMVisionConfig
from trencadis.multimodal.patch_packing import MAX_ASPECT, patch_coordinates
from trencadis.multimodal.pixel_normalisation_and_fixed_point import (
    IMAGENET_STANDARD,
    PixelNormalisation,
    read_normalisation,
)
from trencadis.multimodal.placeholders import expand_placeholders
from trencadis.multimodal.processor_interface import ImageGeometry, Layout, Media, PlaceholderRun, PreparedImage
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    has_processor_settings,
    make_processor_functions,
    read_processor_settings,
)
from trencadis.multimodal.vit.tile_vision_config import CHANNELS

PROCESSOR_TYPES = tuple(f"MiniCPMV4_6ImageProcessor{end}" for end in ("", "Fast", "Pil"))
BICUBIC = 3
LARGEST_SCALE, MOST_SLICES = 2048, 100
BEGIN, END, BEGIN_SLICE, END_SLICE = "<image>", "</image>", "<slice>", "</slice>"
BEGIN_ID, END_ID = "<image_id>", "</image_id>"
FIRST_ID = f"{BEGIN_ID}0{END_ID}"
"""First text of an image's layout, in which ``expand_numbered`` replaces 0 by the image's number in the prompt."""

Size = tuple[float, float]


def round_to_multiple(length: float, divisor: int) -> int:
    """Returns the multiple of ``divisor`` nearest to a length, at least one; halves go to even multiples."""
    return max(round(length / divisor) * divisor, divisor)


@lru_cache(maxsize=256)
def nested_coordinates(h: int, w: int) -> Int32:
    """Returns row and column of each patch of a grid, int32 [h x w, 2]: cell by cell, in it window by window."""
    windows = patch_coordinates(h // 2, w // 2, 2)
    part = np.arange(4, dtype=np.int32)
    rows, columns = (2 * windows[:, i, None] + parts[None] for i, parts in enumerate((part // 2, part % 2)))
    return np.stack([rows.reshape(-1), columns.reshape(-1)], axis=1).astype(np.int32)


@lru_cache(maxsize=256)
def nearest_positions(h: int, w: int, side: int) -> Int32:
    """Returns for each patch of a grid the nearest row of a table of ``side`` x ``side`` positions, int32 [h x w].

    In float32, as in the reference: rounding may give a patch its neighbour's position.
    """
    edges = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)

    def nearest(count: int) -> Int32:
        lines = np.arange(count, dtype=np.float32) / np.float32(count)
        return np.searchsorted(edges, lines, side="right").astype(np.int32)

    at = nested_coordinates(h, w)
    return nearest(h)[at[:, 0]] * side + nearest(w)[at[:, 1]]


@dataclass(frozen=True)
class MiniCPMImageProcessor(TileImageProcessor):
    """``multimodal.processor_interface.Processor`` of images in slices.

    Args:
        scale: pixels along a side of a square slice.
        most: most slices of an image; 1: there are none beside the whole image.
        numbered: a prompt names the number of each image.
    """

    scale: int = 448
    most: int = 9
    numbered: bool = True
    kind: str = "trencadis.multimodal.minicpmv4_6.processor:MiniCPMImageProcessor"

    @property
    def unit(self) -> int:
        """Pixels along a side of a cell."""
        return self.patch * SIDE

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        grid = self._slice_grid(height, width)
        whole = self._fit(height, width, grid is None)
        first = self._patches(whole)
        if grid is None:
            sizes, area, resized = [first], whole[0] * whole[1], whole
        else:
            resized = self._sliced_size(height, width, grid)
            each = self._patches((resized[0] // grid[0], resized[1] // grid[1]))
            sizes, area = [first] + [each] * (grid[0] * grid[1]), whole[0] * whole[1] + resized[0] * resized[1]
        counts, cell = [h * w for h, w in sizes], SIDE * SIDE
        parts = tuple(
            ImageGeometry(resized, (1, h, w), h * w // cell, align_up(h * w, WINDOW_SLOTS), area) for h, w in sizes
        )
        return ImageGeometry(
            resized, (len(sizes), *sizes[-1]), sum(counts) // cell, align_up(max(counts), WINDOW_SLOTS) * len(sizes),
            area, counts[-1] // cell, self._layout(grid, counts[0] // cell, counts[-1] // cell), parts,
        )  # fmt: skip

    def _patches(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // self.patch, size[1] // self.patch

    def _layout(self, grid: tuple[int, int] | None, first: int, each: int) -> Layout:
        """Returns the tokens of the whole image and of the slices row by row, between their marks."""
        head = (FIRST_ID if self.numbered else "") + BEGIN
        if grid is None:
            return head, PlaceholderRun(0, 0, first), END
        layout: list[str | PlaceholderRun] = [head, PlaceholderRun(0, 0, first), END + BEGIN_SLICE]
        for number in range(grid[0] * grid[1]):
            ends_row = (number + 1) % grid[1] == 0
            last = number + 1 == grid[0] * grid[1]
            layout.append(PlaceholderRun(1 + number, 0, each))
            layout.append(END_SLICE + ("" if last else ("\n" if ends_row else "") + BEGIN_SLICE))
        return tuple(layout)

    def _fit(self, height: float, width: float, enlarge: bool) -> tuple[int, int]:
        """Returns a size of whole cells; larger than a slice only if the image is smaller and not to be enlarged."""
        if height * width > self.scale * self.scale or enlarge:
            aspect = width / height
            height = int(self.scale / math.sqrt(aspect))
            width = int(height * aspect)
        return round_to_multiple(height, self.unit), round_to_multiple(width, self.unit)

    def _sliced_size(self, height: int, width: int, grid: tuple[int, int]) -> tuple[int, int]:
        """Returns the size of the image that is cut into a grid of slices."""
        rows, columns = grid
        wide, high = round_to_multiple(width, columns), round_to_multiple(height, rows)
        each = self._fit(high / rows, wide / columns, True)
        return each[0] * rows, each[1] * columns

    def _slice_grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Returns rows and columns of slices, as near to the image's aspect ratio as their number allows; None: the
        image is not cut.
        """
        count = min(math.ceil(width * height / (self.scale * self.scale)), self.most)
        if count <= 1:
            return None
        aspect, best, least = math.log(width / height), (1, 1), math.inf
        for slices in (count - 1, count, count + 1):
            if slices == 1 or slices > self.most:
                continue
            for rows in range(1, slices + 1):
                if slices % rows:
                    continue
                error = abs(aspect - math.log(slices // rows / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, slices // rows), error
        return best

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        grid = self._slice_grid(height, width)
        whole = np.asarray(resize(image, self._fit(height, width, grid is None)))
        if grid is None:
            return [whole]
        larger = np.asarray(resize(image, self._sliced_size(height, width, grid)))
        high, wide = larger.shape[0] // grid[0], larger.shape[1] // grid[1]
        cut = larger.reshape(grid[0], high, grid[1], wide, CHANNELS).transpose(0, 2, 1, 3, 4)
        return [whole, *cut.reshape(-1, high, wide, CHANNELS)]

    def cut_patches(self, tile: UInt8) -> UInt8:
        """Returns the patches of a slice in the order of ``nested_coordinates``, each by channel, row and column."""
        h, w = tile.shape[0] // self.patch, tile.shape[1] // self.patch
        patches = tile.reshape(h, self.patch, w, self.patch, CHANNELS).transpose(0, 2, 4, 1, 3)
        at = nested_coordinates(h, w)
        return np.ascontiguousarray(patches[at[:, 0], at[:, 1]].reshape(-1, self.values))


def resize(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Returns an image of ``size`` (height, width)."""
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC)


def expand_numbered(
    tokens: Sequence[int], image_token: int, media: Sequence[Media], positions: Sequence[int], *rest: object,
    **more: object,
) -> tuple[list[int], list[MediaSpan]]:  # fmt: skip
    """Expands placeholders as ``expand_placeholders``, with the number of each image of the prompt, from 0 on."""
    numbered = [_number(one, i) if isinstance(one, PreparedImage) else one for i, one in enumerate(media)]
    expand: Callable[..., tuple[list[int], list[MediaSpan]]] = expand_placeholders
    return expand(tokens, image_token, numbered, positions, *rest, **more)


def _number(one: PreparedImage, number: int) -> PreparedImage:
    head = one.layout[0] if one.layout else None
    if not isinstance(head, str) or not head.startswith(FIRST_ID):
        return one
    return replace(one, layout=(f"{BEGIN_ID}{number}{END_ID}{head.removeprefix(FIRST_ID)}", *one.layout[1:]))


def _tower_of(config: ModelConfig) -> MiniCPMVisionConfig:
    assert isinstance(config.vision, MiniCPMVisionConfig)
    return config.vision


def load_normalisation(config: ModelConfig) -> PixelNormalisation:
    """Reads how a checkpoint's processor normalises pixels."""
    if not has_processor_settings(config.path):
        return IMAGENET_STANDARD
    return read_normalisation(read_processor_settings(config.path), IMAGENET_STANDARD)


def _read_settings(config: ModelConfig) -> JsonObject:
    """Returns the processor's own fields; without a processor file those of transformers' class, for planning."""
    if not has_processor_settings(config.path):
        return {}
    c, patch = read_processor_settings(config.path), _tower_of(config).patch
    c.only("image_processor_type", PROCESSOR_TYPES, PROCESSOR_TYPES[0])
    c.only("do_resize", (True,), True)
    c.only("resample", (BICUBIC,), BICUBIC)
    c.only("downsample_mode", ("16x",), "16x")
    c.only("patch_size", (patch,), 14)
    scale = c.integer("scale_resolution", patch * SIDE, LARGEST_SCALE, 448)
    most = c.integer("max_slice_nums", 1, MOST_SLICES, 9) if c.boolean("slice_mode", True) else 1
    return {"scale": scale, "most": most, "numbered": c.boolean("use_image_id", True)}


def build_processor(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> MiniCPMImageProcessor:
    """Builds the processor of a checkpoint folder; raises StartupError for unsupported settings."""
    check_processor_kwargs(mm_kwargs)
    v, own = _tower_of(config), load_normalisation(config)
    return MiniCPMImageProcessor(
        own.mean, own.std, own.rescale, image=v.unit, patch=v.patch, merge=SIDE, **_read_settings(config)
    )


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns slots of the largest and the smallest slice, and tokens of the largest image: bounds over all aspects."""
    made = build_processor(config, mm_kwargs)
    side = made.scale / made.unit
    lines = range(1, math.ceil(side) + 2)
    most = max(math.ceil(k * min(side**2 / (k - 0.5), side * math.sqrt(MAX_ASPECT)) + k) for k in lines)
    least = max(min(math.floor(k * (side**2 / (k + 0.5) - 1)) for k in lines), 1)
    largest, smallest = (align_up(cells * SIDE * SIDE, WINDOW_SLOTS) for cells in (most, least))
    return ImageNeeds(largest, smallest, most * (1 + (made.most if made.most > 1 else 0)))


from_checkpoint, image_sizes = make_processor_functions(build_processor)
