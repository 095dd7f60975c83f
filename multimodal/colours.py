"""How a picture's bytes become values on the device: per channel, (byte x rescale - mean) / std."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.checkpoint.fields import Fields

Triple = tuple[float, float, float]
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
LARGEST, LEAST = 1e6, 1e-6
"""Bounds of what a file may say, so that no float32 of it is zero or infinite."""


@dataclass(frozen=True)
class Colours:
    """How a channel's byte becomes a float: (byte x rescale - mean) / std."""

    mean: Triple = CLIP_MEAN
    std: Triple = CLIP_STD
    rescale: float = 1 / 255


CLIP = Colours()
HALF = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""What a processor has that states none: of the families by CLIP, and of those by SigLIP and later ones."""


def read_colours(c: Fields, base: Colours = CLIP) -> Colours:
    """The colours of an image processor's settings.

    Raises:
        StartupError: a value that is none.
    """
    rescale = c.number("rescale_factor", LEAST * LEAST, LARGEST, base.rescale, above=True)
    mean, std = _triple(c, "image_mean", base.mean), _triple(c, "image_std", base.std, LEAST)
    if not c.boolean("do_rescale", True):
        rescale = 1.0
    if not c.boolean("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return Colours(mean, std, rescale)


def _triple(c: Fields, key: str, default: Triple, above: float | None = None) -> Triple:
    """A value for each of three channels, or one for all."""
    given = c.values.get(key, default)
    values = given if isinstance(given, list | tuple) else [given] * 3
    least = -LARGEST if above is None else above
    if len(values) != 3:
        c.refuse(key, "it must be three numbers")
    one, two, three = (
        Fields({key: value}, c.where, c.prefix).number(key, least, LARGEST, above=above is not None) for value in values
    )
    return one, two, three
