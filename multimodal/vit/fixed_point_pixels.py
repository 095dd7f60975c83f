"""Pixels as fixed-point numbers of three bytes, for processors that downscale after the conversion to float.

Such values are multiples of 1/1024 of a byte's step and exceed the bytes' range by up to 40 %. They are sent exactly,
as three bytes each (``TileVisionConfig.bytes_per_value``), and the device adds up the three weighted bytes. Torch-free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
