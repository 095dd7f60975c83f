"""Turns an upright RGB image into patches: computes the size, resizes by Pillow's bicubic, cuts. Pixels stay uint8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.errors import BadRequest, StartupError, attach_param
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.multimodal.convert_to_rgb import to_rgb
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import (
    LOW_DETAIL_PIXELS,
    MediaOptions,
    check_pixel_limits,
    refuse_num_crops,
    server_options,
)
from trencadis.multimodal.patch_packing import Grid, check_aspect, count_slots, count_tokens, patch_grid
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP_MEAN, CLIP_STD, PerChannel
from trencadis.multimodal.processor_interface import ImageGeometry, PreparedImage
from trencadis.multimodal.qwen2_vl.preprocessor_config import QWEN_RULES, ProcessorRules, read_preprocessor_config
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import MERGE, PATCH, TEMPORAL, WINDOW_PATCHES
from trencadis.multimodal.qwen2_vl.smart_resize import enlarge_small, largest_slots, largest_tokens, smart_resize

ALIGNMENTS = ("pad", "resize")
MIN_FIXED_PIXELS = 3136
"""Minimum pixels of a size that a request sets, as in qwen-vl-utils."""


@dataclass(frozen=True)
class Qwen2VLImageProcessor:
    """A checkpoint's image processor.

    Rows of ``pixels`` follow the 2x2 merge cells (cell row, cell column, row in the cell, column in the cell); inside a
    row: channel, temporal, patch row, patch column, the one frame repeated over temporal.

    The device normalises per channel, ``(float32(x * rescale) - mean) / std``: the product in float64, rounded once to
    float32, all else in float32. ``normalised_values`` holds the 3 x 256 possible values, which equal the reference
    processor's ``pixel_values`` bit for bit.
    """

    min_pixels: int
    max_pixels: int
    patch: int = PATCH
    merge: int = MERGE
    temporal: int = TEMPORAL
    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    rescale: float = 1 / 255
    alignment: str = "pad"
    fixed: tuple[int, int] | None = None
    """(height, width) in pixels that a request sets, whatever the image's own size."""
    max_slots_and_tokens: tuple[int, int] | None = None
    """Slots and tokens of the largest image that the server planned for; set if a request brought options."""
    windows: bool = True
    """True if slots stand in windows of 8 x 8 patches, False if cell by cell."""
    clip: tuple[int, int] | None = None
    """``FrameLimits.clip``."""
    clip_rule: str = ""
    """``FrameLimits.rule``."""
    grows_small: bool = False
    """``ProcessorRules.grows_small``."""
    kind: str = "trencadis.multimodal.qwen2_vl.processor:Qwen2VLImageProcessor"

    @classmethod
    def from_checkpoint(
        cls, path: Path, kwargs: JsonMapping, alignment: str = "pad", windows: bool = True, patch: int = PATCH,
        rules: ProcessorRules = QWEN_RULES,
    ) -> Qwen2VLImageProcessor:  # fmt: skip
        """Reads preprocessor_config.json (or processor_config.json); ``kwargs`` may override min_pixels, max_pixels.

        Raises:
            StartupError: no such file, a value that is not implemented, contradictory limits, or a key in ``kwargs``
                that is unknown or not supported.
        """
        mm_kwargs = server_options(kwargs)
        if alignment not in ALIGNMENTS:
            raise StartupError(f"image_alignment is one of {', '.join(ALIGNMENTS)}, not {alignment!r}")
        read = read_preprocessor_config(path, mm_kwargs.pixels, patch, rules)
        if read is None:
            raise StartupError(f"{path} has neither preprocessor_config.json nor processor_config.json")
        normalisation = read.normalisation
        made = cls(
            read.min_pixels,
            read.max_pixels,
            patch,
            mean=normalisation.mean,
            std=normalisation.std,
            rescale=normalisation.rescale,
            alignment=alignment,
            windows=windows,
            grows_small=rules.grows_small,
        )
        check_pixel_limits(made.min_pixels, made.max_pixels, made.factor)
        made._check_checkpoint_values(mm_kwargs.checkpoint)
        refuse_num_crops(mm_kwargs.tiles)
        return made

    def _check_checkpoint_values(self, mm_kwargs: JsonMapping) -> None:
        """Raises StartupError if ``--mm-processor-kwargs`` sets another value than the checkpoint's."""
        own = {
            "patch_size": self.patch, "temporal_patch_size": self.temporal, "merge_size": self.merge,
            "rescale_factor": self.rescale, "image_mean": list(self.mean), "image_std": list(self.std),
        }  # fmt: skip
        for name, value in mm_kwargs.items():
            if (list(value) if isinstance(value, tuple) else value) != own[name]:
                raise StartupError(f"--mm-processor-kwargs: {name}={value!r} is not the checkpoint's {own[name]!r}")

    @property
    def factor(self) -> int:
        """Pixels of which sides are multiples: a merge cell, or with alignment ``resize`` a whole window."""
        return self.patch * (WINDOW_PATCHES if self.alignment == "resize" else self.merge)

    @property
    def fingerprint(self) -> str:
        """Every setting that changes the pixels, as a string; part of every digest."""
        fixed = "x".join(map(str, self.fixed or ()))
        limits = f"{self.min_pixels},{self.max_pixels},{self.alignment},{fixed}"
        return f"rgb8-bicubic:{limits}:{self.patch},{self.merge},{self.temporal}"

    def with_options(self, options: MediaOptions, param: str | None = None) -> Qwen2VLImageProcessor:
        """Returns this processor with a request's options applied, within what the server planned for.

        ``resized_height`` and ``resized_width`` are rounded as in ``smart_resize`` and override everything else;
        ``detail`` low caps ``max_pixels``; a request's maximum below the server's minimum lowers that minimum.

        Args:
            param: JSON path of the part or field that the options came from.

        Raises:
            BadRequest: the options exceed the server's max_pixels, or contradict each other.
        """
        o, path = options, f"{param}." if param else ""
        refuse_num_crops(o.num_crops, param or "")
        low, high = o.min_pixels, self.max_pixels if o.max_pixels is None else o.max_pixels
        if high > self.max_pixels:
            raise BadRequest(f"max_pixels={high} is above this server's {self.max_pixels}.", param=f"{path}max_pixels")
        if high < self.factor**2:
            raise BadRequest(f"max_pixels must be at least {self.factor**2}.", param=f"{path}max_pixels")
        if low is not None and low > high:
            raise BadRequest(f"min_pixels={low} is above the maximum of {high}.", param=f"{path}min_pixels")
        if o.detail == "low":
            high = min(high, max(LOW_DETAIL_PIXELS, self.factor**2))
        low = min(self.min_pixels if low is None else low, high)
        if o.resized_height is not None and o.resized_width is not None:
            return self._with_fixed_size(o.resized_height, o.resized_width, path)
        if (low, high) == (self.min_pixels, self.max_pixels):
            return self
        return replace(self, min_pixels=low, max_pixels=high, max_slots_and_tokens=self._planned)

    def _with_fixed_size(self, height: int, width: int, path: str) -> Qwen2VLImageProcessor:
        least = min(self.min_pixels, MIN_FIXED_PIXELS)
        with attach_param(f"{path}resized_height"):
            made = smart_resize(height, width, self.factor, least, max(height * width, least) * 4)
            slots, tokens = self._planned
            grid = patch_grid(*made, self.patch)
            if (
                made[0] * made[1] > self.max_pixels
                or self._count_slots(grid) > slots
                or count_tokens(grid, self.merge) > tokens
            ):
                raise BadRequest(
                    f"resized_height x resized_width is {made[0]}x{made[1]}, above this server's "
                    f"{self.max_pixels} pixels."
                )
        return replace(self, fixed=made)

    @cached_property
    def _planned(self) -> tuple[int, int]:
        """Slots and tokens of the largest image that the server's own limits allow."""
        return self.max_slots_and_tokens or (self.largest_slots, self.largest_tokens)

    @property
    def normalised_values(self) -> npt.NDArray[np.float32]:
        """Result on the device for each channel and byte, float32 [3, 256]."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32)[:, None], np.array(self.std, np.float32)[:, None]
        return np.asarray((scaled[None] - mean) / std, np.float32)

    @property
    def largest_slots(self) -> int:
        """An upper bound of the VISION slots of one image."""
        return largest_slots(self.min_pixels, self.max_pixels, self.factor, self.patch, self.windows)

    @property
    def largest_tokens(self) -> int:
        """An upper bound of the decoder tokens of one image."""
        return largest_tokens(self.min_pixels, self.max_pixels, self.factor, self.patch, self.merge)

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) in pixels to which an image of ``height`` x ``width`` pixels is resized.

        Raises:
            BadRequest: an aspect ratio above 200, or the request's options make the image larger than the server
                planned for (a thin image scaled up to a high min_pixels).
        """
        if self.fixed is not None:
            check_aspect(height, width)
            return self.fixed
        if self.grows_small:
            height, width = enlarge_small(height, width, self.factor)
        made = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return made if self.max_slots_and_tokens is None else self._check_within(made, *self.max_slots_and_tokens)

    def _check_within(self, size: tuple[int, int], slots: int, tokens: int) -> tuple[int, int]:
        """Returns ``size`` if it has no more than ``slots`` slots and ``tokens`` tokens.

        Raises BadRequest otherwise.
        """
        grid = patch_grid(*size, self.patch)
        if self._count_slots(grid) > slots or count_tokens(grid, self.merge) > tokens:
            raise BadRequest(f"min_pixels={self.min_pixels} makes this thin image too large for this server.")
        return size

    def frame_limits(self) -> JsonObject:
        """Returns the limits of a video's frames, which are those of images."""
        return {
            "least": self.min_pixels, "most": self.max_pixels, "factor": self.factor, "cell": self.patch * self.merge,
            "slots": self.largest_slots, "tokens": self.largest_tokens, "windows": self.windows,
            "clip": self.clip, "rule": self.clip_rule,
        }  # fmt: skip

    @property
    def values(self) -> int:
        """Number of uint8 values of a patch."""
        return 3 * self.temporal * self.patch**2

    def compute_geometry(self, height: int, width: int) -> ImageGeometry:
        """Returns the geometry of an image; raises BadRequest as ``target_size``."""
        made = self.target_size(height, width)
        grid = patch_grid(*made, self.patch)
        return ImageGeometry(made, grid, count_tokens(grid, self.merge), self._count_slots(grid), made[0] * made[1])

    def _count_slots(self, grid: Grid) -> int:
        return count_slots(grid, self.windows)

    def prepare(self, image: Image.Image, digest: str, original: tuple[int, int] | None = None) -> PreparedImage:
        """Resizes an upright image and cuts it into patches.

        Args:
            image: of any mode that converts to RGB.
            digest: of the result.
            original: the file's (height, width) in pixels, if ``image`` was shrunk while it was decoded.

        Raises:
            BadRequest: an aspect ratio above 200, or a mode that does not convert to RGB.
        """
        if image.mode != "RGB":
            image = to_rgb(image)
        original = original or (image.height, image.width)
        made = self.compute_geometry(*original)
        pixels = np.asarray(image.resize(made.resized[::-1], Image.Resampling.BICUBIC))
        return PreparedImage(
            digest, self._cut_patches(pixels, made.grid), made.grid, made.tokens, made.slots, made.resized, original
        )

    def _cut_patches(self, pixels: npt.NDArray[np.uint8], grid: Grid) -> npt.NDArray[np.uint8]:
        """Cuts uint8 [height, width, 3] into uint8 [patches, 3 x temporal x patch x patch]."""
        _, h, w = grid
        p, m = self.patch, self.merge
        cells = pixels.reshape(h // m, m, p, w // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        out = np.empty((h // m, w // m, m, m, 3, self.temporal, p, p), np.uint8)
        # Copying the finished frame is faster than gathering it again.
        out[:, :, :, :, :, 0] = cells
        out[:, :, :, :, :, 1:] = out[:, :, :, :, :, :1]
        return out.reshape(h * w, 3 * self.temporal * p * p)


def load_windowed_processor(config: ModelConfig, kwargs: JsonMapping, alignment: str = "pad") -> Qwen2VLImageProcessor:
    """Returns Qwen2.5-VL's processor: slots in windows. See ``Qwen2VLImageProcessor.from_checkpoint``."""
    return Qwen2VLImageProcessor.from_checkpoint(config.path, kwargs, alignment)


def load_processor(config: ModelConfig, kwargs: JsonMapping, alignment: str = "pad") -> Qwen2VLImageProcessor:
    """Returns Qwen2-VL's processor: slots cell by cell. See ``Qwen2VLImageProcessor.from_checkpoint``."""
    return Qwen2VLImageProcessor.from_checkpoint(config.path, kwargs, alignment, windows=False)
