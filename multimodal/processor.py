"""The seam between pictures and families: what a family's image processor is asked, and what it makes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trencadis.multimodal.grids import Grid
from trencadis.multimodal.options import MediaOptions

if TYPE_CHECKING:
    from PIL import Image

FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of a checkpoint that state its image processor, the one that counts first."""


@dataclass(frozen=True)
class Prepared:
    """One image, ready for the vision tower.

    Args:
        digest: hex digest of its bytes and of the processing options.
        pixels: uint8 [real slots, values of a slot], C order.
        grid: patches (1, h, w).
        tokens: decoder tokens.
        slots: VISION slots, a multiple of 64.
        resized: (height, width) in pixels as the model sees it; boxes in answers refer to it.
        original: (height, width) in pixels of the upright image before resizing.
    """

    digest: str
    pixels: npt.NDArray[np.uint8]
    grid: Grid
    tokens: int
    slots: int
    resized: tuple[int, int]
    original: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.pixels.nbytes + 512


class ImageOutline(NamedTuple):
    """What an image becomes, by its height and width alone.

    Args:
        resized: (height, width) in pixels as the model sees it.
        grid: patches (1, h, w).
        tokens: decoder tokens.
        slots: VISION slots, a multiple of 64.
        area: most pixels that an image has on the way to ``resized``.
    """

    resized: tuple[int, int]
    grid: Grid
    tokens: int
    slots: int
    area: int


class Processor(Protocol):
    """A checkpoint's image processor: a frozen dataclass whose fields are JSON, so that it can travel."""

    @property
    def kind(self) -> str:
        """``module:class`` of it, a field among the others: a decode worker makes it again of them."""
        ...

    @property
    def values(self) -> int:
        """uint8 values of a slot."""
        ...

    @property
    def fingerprint(self) -> str:
        """Every setting that changes the pixels, as a string; part of every digest."""
        ...

    def with_options(self, options: MediaOptions, param: str | None = None) -> Processor:
        """This processor with a request's options, within what the server planned for; raises BadRequest."""
        ...

    def sizes(self, height: int, width: int) -> ImageOutline:
        """What an image of ``height`` x ``width`` pixels becomes; touches no pixel, raises BadRequest."""
        ...

    def prepare(self, image: Image.Image, digest: str, original: tuple[int, int] | None = None) -> Prepared:
        """Makes it of an upright image, whose file has ``original`` (height, width); raises BadRequest."""
        ...


class VideoProcessor(Processor, Protocol):
    """A processor whose model takes videos: each pair of frames is an item."""

    def frames(self) -> dict[str, Any]:
        """The fields of ``videos.sampling.FrameLimits``."""
        ...


def processor_of(fields: Mapping[str, Any]) -> Processor:
    """A processor of its fields, as JSON delivers them."""
    module, _, name = fields["kind"].partition(":")
    made: Processor = getattr(import_module(module), name)(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    )
    return made
