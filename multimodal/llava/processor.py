"""CLIP's image processor: the shorter side to the picture's size, the centre of that, cut into patches row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trencadis.core.checkpoint.fields import Fields, read_json
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.multimodal.colours import CLIP_MEAN, CLIP_STD, Colours, Triple, read_colours
from trencadis.multimodal.grids import check_aspect
from trencadis.multimodal.images.decode import to_rgb
from trencadis.multimodal.images.limits import server_options
from trencadis.multimodal.llava.config import CHANNELS, ClipTower
from trencadis.multimodal.options import MediaOptions
from trencadis.multimodal.processor import FILES, ImageOutline, Prepared

BICUBIC = 3
KINDS = ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil")
ONE_SIZE = "This model's pictures have one size; min_pixels, max_pixels and resized sizes do not apply."


@dataclass(frozen=True)
class ClipProcessor:
    """``multimodal.processor.Processor`` of pictures of one size.

    Args:
        image: pixels along a side of the picture.
        patch: pixels along a side of a patch.
        slots: VISION slots of a picture, its class token included.
    """

    image: int
    patch: int
    slots: int
    mean: Triple = CLIP_MEAN
    std: Triple = CLIP_STD
    rescale: float = 1 / 255
    kind: str = "trencadis.multimodal.llava.processor:ClipProcessor"

    @property
    def values(self) -> int:
        """uint8 values of a patch."""
        return CHANNELS * self.patch**2

    @property
    def fingerprint(self) -> str:
        """Every setting that changes the pixels."""
        return f"rgb8-bicubic-centre:{self.image},{self.patch}"

    def with_options(self, options: MediaOptions, param: str | None = None) -> ClipProcessor:
        """This processor; raises BadRequest for options that would resize a picture otherwise."""
        for name in ("min_pixels", "max_pixels", "resized_height", "resized_width"):
            if getattr(options, name) is not None:
                raise BadRequest(ONE_SIZE, param=f"{param}.{name}" if param else name)
        return self

    def sizes(self, height: int, width: int) -> ImageOutline:
        """What an image becomes; raises BadRequest for an aspect ratio above 200."""
        check_aspect(height, width)
        side = self.image // self.patch
        rows, columns = self.resized(height, width)
        return ImageOutline((self.image, self.image), (1, side, side), side * side, self.slots, rows * columns)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) with the shorter side at ``image`` pixels, the longer rounded down, before the crop."""
        if width <= height:
            return int(self.image * height / width), self.image
        return self.image, int(self.image * width / height)

    @property
    def table(self) -> npt.NDArray[np.float32]:
        """float32 [3, 256]: the device's result for each channel and byte."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32)[:, None], np.array(self.std, np.float32)[:, None]
        return np.asarray((scaled[None] - mean) / std, np.float32)

    def prepare(self, image: Image.Image, digest: str, original: tuple[int, int] | None = None) -> Prepared:
        """Resizes an upright image, takes its centre and cuts it into patches."""
        if image.mode != "RGB":
            image = to_rgb(image)
        original = original or (image.height, image.width)
        made, (rows, columns) = self.sizes(*original), self.resized(*original)
        smooth = image.resize((columns, rows), Image.Resampling.BICUBIC)
        top, left = (rows - self.image) // 2, (columns - self.image) // 2
        pixels = np.asarray(smooth.crop((left, top, left + self.image, top + self.image)))
        side, p = self.image // self.patch, self.patch
        cut = pixels.reshape(side, p, side, p, CHANNELS).transpose(0, 2, 4, 1, 3).reshape(side * side, self.values)
        return Prepared(digest, np.ascontiguousarray(cut), made.grid, made.tokens, made.slots, made.resized, original)


def read_settings(path: Path, image: int) -> Colours:
    """The colours that a checkpoint's processor file states; the rest is held to what is implemented.

    Raises:
        StartupError: no file, or a value that is not implemented.
    """
    where = next((path / name for name in FILES if (path / name).is_file()), None)
    if where is None:
        raise StartupError(f"{path} has neither preprocessor_config.json nor processor_config.json")
    c = Fields(read_json(where) or {}, where)
    if "image_processor" in c.values:
        c = c.within("image_processor")
    c.only("image_processor_type", KINDS, KINDS[0])
    for key in ("do_resize", "do_center_crop"):
        c.only(key, (True,), True)
    c.only("resample", (BICUBIC,), BICUBIC)
    size = c.within("size", {"shortest_edge": 224})
    size.only("shortest_edge", (image,), 224)
    if set(size.values) - {"shortest_edge"}:
        c.refuse("size", "implemented: shortest_edge alone")
    if isinstance(c.values.get("crop_size"), int):
        c.only("crop_size", (image,))
    else:
        crop = c.within("crop_size", {"height": 224, "width": 224})
        for key in ("height", "width"):
            crop.only(key, (image,), 224)
    return read_colours(c)


def tower_of(config: ModelConfig) -> ClipTower:
    """The tower's configuration."""
    assert isinstance(config.vision, ClipTower)
    return config.vision


def _check_options(asked: Mapping[str, Any]) -> None:
    """Refuses ``--mm-processor-kwargs`` that would change a picture's size or pixels."""
    given = server_options(asked)
    if given.pixels or given.checkpoint:
        name = next(iter({**given.pixels, **given.checkpoint}))
        raise StartupError(f"--mm-processor-kwargs: {name} does not apply, the pictures of this model have one size")


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ClipProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    _check_options(asked)
    v = tower_of(config)
    colours = read_settings(config.path, v.image)
    return ClipProcessor(v.image, v.patch, v.tile, **{f.name: getattr(colours, f.name) for f in fields(colours)})


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """Every picture needs one tile; raises StartupError for options that do not apply."""
    _check_options(asked)
    v = tower_of(config)
    return ImageNeeds(v.tile, v.tile, v.tokens, tile=v.tile)


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> partial[ImageOutline]:
    """What an image becomes by its height and width."""
    v = tower_of(config)
    return partial(ClipProcessor.sizes, ClipProcessor(v.image, v.patch, v.tile))
