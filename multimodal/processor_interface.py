"""Interface between the server and a family's image processor, and prepared images and videos. Torch-free.

The engine encodes each temporal patch of a video separately; only positions connect them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.media_spans import MediaSpan
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions
from trencadis.multimodal.patch_packing import Grid

if TYPE_CHECKING:
    from PIL import Image

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of a checkpoint with its image processor's settings, in order of precedence."""


class PlaceholderRun(NamedTuple):
    """A run of placeholder tokens of an image: ``tokens`` tokens that take arena rows from ``first`` on of item
    ``item``.

    ``constant``: if not negative, all tokens take this constant row instead (``core.media_spans.TokenRun``), and
    belong to the item's span. ``visible_rows``: if not 0, they take no rows, and tokens from here on attend to the
    item's first ``visible_rows`` rows (``MediaSpan``).
    """

    item: int
    first: int
    tokens: int
    constant: int = -1
    visible_rows: int = 0


Layout = tuple[str | PlaceholderRun, ...]
"""Placeholder tokens and text between them; special tokens in the text become tokens."""


@dataclass(frozen=True)
class PreparedImage:
    """One image, ready for the vision tower.

    Args:
        digest: hex digest of its bytes and of the processing options.
        pixels: uint8 [real slots, values of a slot], C order.
        grid: patches (items, h, w).
        tokens: placeholder tokens; for an item of an image: its arena rows.
        slots: VISION slots, a multiple of 64.
        resized: (height, width) in pixels as the model sees it; boxes in answers refer to it.
        original: (height, width) in pixels of the upright image before resizing.
        items: the tiles that the engine encodes one by one; empty: the image is one item.
        layout: what replaces the placeholder in a prompt; empty: the image's tokens, which take its rows in order.
    """

    digest: str
    pixels: npt.NDArray[np.uint8]
    grid: Grid
    tokens: int
    slots: int
    resized: tuple[int, int]
    original: tuple[int, int] = (0, 0)
    items: tuple[PreparedImage, ...] = ()
    layout: Layout = ()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.pixels.nbytes + 512 * (1 + len(self.items))


class ImageGeometry(NamedTuple):
    """Geometry of an image of a given size: resized sides, patch grid, tokens and VISION slots; computed without
    touching pixels.

    Args:
        resized: (height, width) in pixels as the model sees it.
        grid: patches (items, h, w); more than one item if the image is cut into tiles.
        tokens: placeholder tokens.
        slots: VISION slots of all items, a multiple of 64 each.
        area: largest number of pixels that the image has at any point of processing.
        rows: arena rows of an item, if there are several items or a ``layout`` assigns tokens to them.
        layout: as in ``PreparedImage``.
        parts: geometry of each item in order, if they are not all alike; ``grid`` and ``rows`` are then those of tiles.
    """

    resized: tuple[int, int]
    grid: Grid
    tokens: int
    slots: int
    area: int
    rows: int = 0
    layout: Layout = ()
    parts: tuple[ImageGeometry, ...] = ()

    @property
    def patches(self) -> int:
        """Number of real slots of all items, without class tokens."""
        return sum(one.patches for one in self.parts) if self.parts else math.prod(self.grid)

    @property
    def item(self) -> ImageGeometry:
        """Geometry of one of its items."""
        count, held = self.grid[0], self.rows or self.tokens
        return ImageGeometry(self.resized, (1, *self.grid[1:]), held, self.slots // count, self.area)

    @property
    def all_items(self) -> tuple[ImageGeometry, ...]:
        """Geometry of each item, in order."""
        return self.parts or (self.item,) * self.grid[0]

    def make_prepared(self, pixels: npt.NDArray[np.uint8], digest: str, original: tuple[int, int]) -> PreparedImage:
        """Combines this geometry with pixels, uint8 [patches of all items, values of a slot], into a prepared image."""
        whole = PreparedImage(digest, pixels, self.grid, self.tokens, self.slots, self.resized, original)
        return self._split_items(whole, pixels) if self.layout else whole

    def _split_items(self, whole: PreparedImage, pixels: npt.NDArray[np.uint8]) -> PreparedImage:
        """Returns the image with items for its tiles, or with text between its placeholders."""
        each = self.all_items
        if len(each) == 1:
            items: tuple[PreparedImage, ...] = (replace(whole, tokens=each[0].tokens),)
        else:
            cut = np.split(pixels, np.cumsum([one.patches for one in each])[:-1])
            items = tuple(
                PreparedImage(tile_digest(p, one.grid[1:]), p, one.grid, one.tokens, one.slots, one.resized)
                for one, p in zip(each, cut, strict=True)
            )
        return replace(whole, items=items, layout=self.layout)


def tile_digest(pixels: npt.NDArray[np.uint8], grid: tuple[int, int]) -> str:
    """Returns a 256-bit hex digest of a tile of ``grid`` patches (h, w): equal tiles share arena rows, whatever images
    they come from.
    """
    digest = hashlib.blake2b(f"tile {grid[0]}x{grid[1]}\0".encode(), digest_size=32)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


class Processor(Protocol):
    """A checkpoint's image processor: a frozen dataclass whose fields are JSON values, so that it can be sent to
    another process.
    """

    @property
    def kind(self) -> str:
        """``module:class`` of the processor, one of its fields: a decode worker rebuilds it from them."""
        ...

    @property
    def values(self) -> int:
        """Number of uint8 values of a slot."""
        ...

    @property
    def fingerprint(self) -> str:
        """Every setting that changes the pixels, as a string; part of every digest."""
        ...

    def with_options(self, options: MediaOptions, param: str | None = None) -> Processor:
        """Returns this processor with a request's options, within what the server planned for; raises BadRequest."""
        ...

    def compute_geometry(self, height: int, width: int) -> ImageGeometry:
        """Returns the geometry of an image of ``height`` x ``width`` pixels; touches no pixel, raises BadRequest."""
        ...

    def prepare(self, image: Image.Image, digest: str, original: tuple[int, int] | None = None) -> PreparedImage:
        """Prepares an upright image, whose file has ``original`` (height, width); raises BadRequest."""
        ...


class VideoProcessor(Processor, Protocol):
    """A processor whose model takes videos: each pair of frames is an item."""

    def frame_limits(self) -> JsonObject:
        """Returns the fields of ``videos.frame_sampling.FrameLimits``."""
        ...


def build_processor(fields: JsonMapping) -> Processor:
    """Builds an image processor from its fields, as decoded from JSON."""
    module, _, name = fields["kind"].partition(":")
    made: Processor = getattr(import_module(module), name)(**{key: _freeze(value) for key, value in fields.items()})
    return made


def _freeze(value: Json) -> Json:
    """Turns the lists that JSON makes of tuples back into tuples."""
    return tuple(_freeze(one) for one in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class PreparedVideo:
    """One video, ready for the vision tower.

    Args:
        digest: hex digest of its bytes and of the processing options.
        patches: one item per temporal patch, each with its own digest, so that equal frames share arena rows.
        indices: indices of the sampled frames, two per temporal patch.
        fps: rate of the sampled frames; it sets the time axis of their positions.
        seconds: seconds from one temporal patch to the next.
        frames: number of all frames of the video.
        rate: frame rate of the video itself.
    """

    digest: str
    patches: tuple[PreparedImage, ...]
    indices: tuple[int, ...]
    fps: float
    seconds: float
    frames: int
    rate: float = 1.0

    @property
    def grid(self) -> Grid:
        """Patches (t, h, w)."""
        return len(self.patches), self.patches[0].grid[1], self.patches[0].grid[2]

    @property
    def tokens(self) -> int:
        """Decoder tokens of all temporal patches."""
        return sum(p.tokens for p in self.patches)

    @property
    def resized(self) -> tuple[int, int]:
        """(height, width) of a frame in pixels as the model sees it."""
        return self.patches[0].resized

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(p.nbytes for p in self.patches) + 512


Media = PreparedImage | PreparedVideo
"""The prepared form of one content part."""


def encoder_items(media: Sequence[Media]) -> list[PreparedImage]:
    """Returns the items that the engine encodes one by one: images, tiles and temporal patches, in prompt order."""
    return [item for one in media for item in (one.patches if isinstance(one, PreparedVideo) else one.items or (one,))]


def position_spans(spans: Sequence[MediaSpan], media: Sequence[Media]) -> tuple[list[MediaSpan], list[float | None]]:
    """Returns the arguments of ``mrope_positions``: one span per image or video, and seconds between its temporal
    patches.

    Args:
        spans: one per item of ``encoder_items(media)``, in that order.

    Returns:
        Spans, and for each the seconds from one temporal patch to the next (None for an image).
    """
    whole: list[MediaSpan] = []
    seconds: list[float | None] = []
    at = 0
    for one in media:
        if isinstance(one, PreparedVideo):
            whole.append(MediaSpan(spans[at].offset, one.tokens, one.digest, one.grid, 0))
            seconds.append(one.seconds)
            at += len(one.patches)
        else:
            whole.append(spans[at])
            seconds.append(None)
            at += len(one.items) or 1
    return whole, seconds
