"""Per-channel pixel normalisation, (byte x rescale - mean) / std, from an image processor's settings."""

from __future__ import annotations

from dataclasses import dataclass

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
