"""Per-channel pixel normalisation, (byte x rescale - mean) / std, from an image processor's settings. Torch-free.

Processors that downscale after the conversion to float have pixels that are multiples of 1/1024 of a byte's step and
exceed the bytes' range by up to 40 %. They are sent exactly, as fixed-point numbers of three bytes
(``TileVisionConfig.bytes_per_value``), and the device adds up the three weighted bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trencadis.core.checkpoint.json_fields import JsonFields

PerChannel = tuple[float, float, float]
CLIP_MEAN: PerChannel = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: PerChannel = (0.26862954, 0.26130258, 0.27577711)
LARGEST, LEAST = 1e6, 1e-6
"""Bounds of values in a file, so that no float32 computed of them is zero or infinite."""


@dataclass(frozen=True)
class PixelNormalisation:
    """Normalisation of one processor: a byte becomes (byte x rescale - mean) / std, per channel."""

    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    rescale: float = 1 / 255


CLIP = PixelNormalisation()
IMAGENET_STANDARD = PixelNormalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Default of processors without settings of their own: ``CLIP`` in families with CLIP's tower, this one in those
with SigLIP's and in later ones.
"""


def read_normalisation(c: JsonFields, default: PixelNormalisation = CLIP) -> PixelNormalisation:
    """Reads the pixel normalisation from an image processor's settings.

    Raises:
        StartupError: a value that is not valid.
    """
    rescale = c.number("rescale_factor", LEAST * LEAST, LARGEST, default.rescale, above=True)
    mean, std = _read_per_channel(c, "image_mean", default.mean), _read_per_channel(c, "image_std", default.std, LEAST)
    if not c.boolean("do_rescale", True):
        rescale = 1.0
    if not c.boolean("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return PixelNormalisation(mean, std, rescale)


def _read_per_channel(c: JsonFields, key: str, default: PerChannel, above: float | None = None) -> PerChannel:
    """Reads a value for each of three channels, or one for all."""
    given = c.values.get(key, default)
    values = given if isinstance(given, list | tuple) else [given] * 3
    least = -LARGEST if above is None else above
    if len(values) != 3:
        c.refuse(key, "it must be three numbers")
    one, two, three = (
        JsonFields({key: value}, c.where, c.prefix).number(key, least, LARGEST, above=above is not None)
        for value in values
    )
    return one, two, three


PLANES = 3

UNIT = 1024
"""Values are integer multiples of 1 / UNIT."""

OFFSET = 128
"""Added to a value, so that none is negative."""

PLANE_WEIGHTS = (64.0, 0.25, 1 / UNIT)
"""Value of a step of each byte, the highest byte first."""

BICUBIC_TAPS = (-3, 19, 19, -3)
"""Weights of cubic convolution (a = -3/4) half way between two values, in 1/32."""

UInt8 = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]


def encode_fixed_point(values: Int32) -> UInt8:
    """Encodes values [..., channels], in 1 / UNIT, as uint8 [..., 3 x channels]: high bytes, then middle, then low
    ones.
    """
    shifted = values + OFFSET * UNIT
    return np.concatenate([shifted >> 16, shifted >> 8 & 255, shifted & 255], -1).astype(np.uint8)


def encode_bytes(pixels: UInt8) -> UInt8:
    """Encodes uint8 pixels as fixed-point numbers."""
    return encode_fixed_point(pixels.astype(np.int32) * UNIT)


def downscale_bicubic(pixels: UInt8, side: int) -> Int32:
    """Returns int32 [side, side, channels], in 1 / UNIT, of an image whose sides are multiples of ``side``.

    Bicubic as torch's ``interpolate`` computes it: no antialiasing, edges repeated. For an odd factor, samples fall on
    pixels; for an even factor, half way between two.
    """
    return _downscale_axis(_downscale_axis(pixels.astype(np.int32), side).swapaxes(0, 1), side).swapaxes(0, 1)


def _downscale_axis(values: Int32, side: int) -> Int32:
    """Returns the values with the first axis reduced to ``side``, multiplied by 32."""
    factor = len(values) // side
    if factor % 2:
        return values[factor // 2 :: factor] * 32
    first = np.arange(side) * factor + factor // 2 - 2
    mixed = np.zeros((side, *values.shape[1:]), np.int32)
    for tap, weight in enumerate(BICUBIC_TAPS):
        mixed += weight * values[np.clip(first + tap, 0, len(values) - 1)]
    return mixed
