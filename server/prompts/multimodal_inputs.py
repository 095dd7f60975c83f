"""The interface to ``multimodal``: prepared media, and their placeholder tokens, spans, positions and pixels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from trencadis.core.checkpoint.family import VisionSide
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.checkpoint.model_registry import family_of, import_object
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.media_spans import MediaSpan
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import NO_SCOPE, MediaPart, MediaScope
from trencadis.multimodal.media_timing_and_concurrency import gather_or_cancel

if TYPE_CHECKING:
    from trencadis.multimodal.images.processor_cache import CacheCounters
    from trencadis.multimodal.patch_packing import Grid
    from trencadis.multimodal.processor_interface import Media as PreparedMedia


class ImageItem(Protocol):
    """A prepared image, or a temporal patch of a video; made by ``multimodal``."""

    @property
    def pixels(self) -> Any: ...
    @property
    def grid(self) -> Grid: ...
    @property
    def tokens(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def resized(self) -> tuple[int, int]: ...
    @property
    def original(self) -> tuple[int, int]: ...


class VideoItem(Protocol):
    """A prepared video; made by ``multimodal``."""

    @property
    def patches(self) -> Sequence[ImageItem]: ...
    @property
    def grid(self) -> Grid: ...
    @property
    def tokens(self) -> int: ...
    @property
    def resized(self) -> tuple[int, int]: ...
    @property
    def indices(self) -> Sequence[int]: ...
    @property
    def fps(self) -> float: ...
    @property
    def frames(self) -> int: ...


MediaItem = ImageItem | VideoItem


class ImageSource(Protocol):
    """Prepares images."""

    @property
    def cache(self) -> CacheCounters:
        """The cache of prepared images."""
        ...

    async def prepare(self, parts: Sequence[MediaPart], scope: MediaScope = NO_SCOPE) -> Sequence[ImageItem]:
        """Fetches, decodes, resizes and cuts; raises TrencadisError with the part's path as ``param``."""
        ...


class VideoSource(Protocol):
    """Prepares videos."""

    async def prepare(
        self, parts: Sequence[MediaPart], tokens_left: int, scope: MediaScope = NO_SCOPE
    ) -> Sequence[VideoItem]:
        """Fetches, decodes, samples, resizes and cuts; raises TrencadisError with the part's path as ``param``.

        ``tokens_left``: tokens that remain for each video beside the prompt's text.
        """
        ...


async def prepare_media(
    parts: Sequence[MediaPart],
    images: ImageSource | None,
    videos: VideoSource | None,
    tokens_left: int,
    scope: MediaScope,
) -> list[MediaItem]:
    """Prepares media of both kinds concurrently; images come first in the result.

    Args:
        tokens_left: tokens that the prompt leaves to each video.

    Raises:
        BadRequest: one of the kinds has no source.
    """
    stills = [p for p in parts if p.kind == "image"]
    clips = [p for p in parts if p.kind == "video"]
    for kind, some, source in (("image", stills, images), ("video", clips, videos)):
        if some and source is None:
            raise BadRequest(f"At most 0 {kind}(s) may be provided in one prompt.", param=kind)
    running: list[Awaitable[Sequence[MediaItem]]] = []
    if images is not None and stills:
        running.append(images.prepare(stills, scope))
    if videos is not None and clips:
        running.append(videos.prepare(clips, tokens_left, scope))
    return [one for some in await gather_or_cancel(running) for one in some]


def is_video(medium: MediaItem) -> bool:
    """Returns True if a medium is a video."""
    return hasattr(medium, "patches")


def list_encoder_items(media: Sequence[MediaItem]) -> list[ImageItem]:
    """Lists the items that the engine encodes: images or their tiles, and temporal patches, in prompt order."""
    found: list[ImageItem] = []
    for one in media:
        parts = getattr(one, "patches", ()) or getattr(one, "items", ()) or (one,)
        found += cast("Sequence[ImageItem]", parts)
    return found


@dataclass(slots=True)
class ExpandedPrompt:
    """A prompt in which placeholders of its media are expanded; one span per encoder item."""

    tokens: list[int]
    spans: list[MediaSpan] = field(default_factory=list)
    positions: bytes | None = None
    delta: int = 0


class MediaJoiner(Protocol):
    """Expands the placeholders of a prompt's media."""

    def __call__(self, tokens: Sequence[int], media: Sequence[MediaItem]) -> ExpandedPrompt:
        """``tokens`` holds one image or video token per medium, in order, where the template put them."""
        ...


class PlaceholderJoiner:
    """Expands placeholders and computes rotary positions by the rules of the model family.

    ``encode`` returns the ids of a text that follows a placeholder.
    """

    def __init__(self, config: ModelConfig, encode: Callable[[str], list[int]] | None = None) -> None:
        self._config, self._encode = config, encode

    def __call__(self, tokens: Sequence[int], media: Sequence[MediaItem]) -> ExpandedPrompt:
        """See MediaJoiner.

        Raises:
            BadRequest: the template placed fewer or more media than there are.
        """
        if not media:
            return ExpandedPrompt(list(tokens))
        c, prepared = self._config, cast("list[PreparedMedia]", media)
        token_positions = find_media_positions(tokens, c.placeholder_token, c.video_token, media)
        put = (
            self._put_with_timestamps(prepared, self._encode)
            if self._side.times and self._encode is not None
            else self._put
        )
        expanded, spans = put(tokens, c.image_token, prepared, token_positions, c.video_token, self._encode)
        if self._positions is None:
            return ExpandedPrompt(expanded, spans)
        # If each medium is one item, there is no time between its items.
        whole, seconds = (spans, []) if self._side.times or len(spans) == len(media) else _merge_spans(spans, prepared)
        positions, delta = self._positions(len(expanded), whole, c.vision, seconds)
        return ExpandedPrompt(expanded, spans, positions.astype("<i4").tobytes(), int(delta))

    @cached_property
    def _side(self) -> VisionSide:
        side = family_of(self._config.architecture).vision
        assert side is not None  # the API process prepares no media for a model without vision
        return side

    @cached_property
    def _put(self) -> Callable[..., Any]:
        """The model family's function that expands placeholders."""
        put, expanded = import_object(self._side.expand), self._config.placeholder_token
        return put if expanded == self._config.image_token else partial(put, placed=expanded)

    @cached_property
    def _positions(self) -> Callable[..., Any] | None:
        """The function that computes rotary positions; None if the position of each token is its index."""
        plain = not self._side.positions or self._config.text.mrope_section is None
        return None if plain else import_object(self._side.positions)

    def _put_with_timestamps(
        self, media: Sequence[PreparedMedia], encode: Callable[[str], list[int]]
    ) -> Callable[..., Any]:
        """Returns ``_put`` with the timestamps of each video's frames as texts."""
        times = import_object(self._side.times)
        texts = [encode(text) for one in media if is_video(one) for text in times(one)]
        return partial(self._put, times=texts, marks=(self._config.vision_start, self._config.vision_end))


def _merge_spans(
    spans: Sequence[MediaSpan], media: Sequence[PreparedMedia]
) -> tuple[list[MediaSpan], list[float | None]]:
    from trencadis.multimodal.processor_interface import position_spans

    return position_spans(spans, media)


def check_tokens(config: ModelConfig, token_id: Callable[[str], int | None]) -> None:
    """Raises if ids of media tokens in config.json differ from the tokenizer's: placeholders would be missed, or
    words mistaken for them.

    Raises:
        StartupError: an id differs; the message names the key and both ids.
    """
    side = family_of(config.architecture).vision
    ids = config.image_token, config.video_token, config.vision_start, config.vision_end
    for (key, name), ours in zip(side.tokens.items() if side else (), ids, strict=False):
        theirs = token_id(name)
        if ours >= 0 and theirs is not None and ours != theirs:
            raise StartupError(f"{config.path}/config.json: {key} is {ours}; in the tokenizer {name} is {theirs}")


def arrange_media(tokens: Sequence[int], image: int, video: int, media: Sequence[MediaItem]) -> list[MediaItem]:
    """Returns ``media`` in the order of the prompt's image and video tokens; each kind keeps its own order."""
    kinds = {image: [m for m in media if not is_video(m)], video: [m for m in media if is_video(m)]}
    queues = {token: iter(some) for token, some in kinds.items()}
    found = [next(queues[t], None) for t in tokens if t in queues]
    # If there are too few or too many, the joiner raises.
    return [m for m in found if m is not None] if len(found) == len(media) else list(media)


def find_media_positions(tokens: Sequence[int], image: int, video: int, media: Sequence[MediaItem]) -> list[int]:
    """Returns the indices of the image and video tokens that the template placed.

    Raises:
        BadRequest: they do not match ``media`` in number or order.
    """
    positions = [i for i, token in enumerate(tokens) if token in (image, video)]
    for token, name, clips in ((image, "images", False), (video, "videos", True)):
        found, given = sum(tokens[i] == token for i in positions), sum(is_video(m) == clips for m in media)
        if found != given:
            raise BadRequest(f"The chat template placed {found} of {given} {name}.", param="messages")
    if [tokens[i] == video for i in positions] != [is_video(m) for m in media]:
        raise BadRequest("The chat template changed the order of images and videos.", param="messages")
    return positions


def make_token_positions(text: TextConfig, tokens: list[int], types: Sequence[int] = ()) -> ExpandedPrompt | None:
    """Returns the prompt with token positions, if it has padding ids or token types; else None: positions are indices.

    The second position of a token is its first plus its type; padding ids take no position.
    """
    ids = np.asarray(tokens)
    real = ids != text.pad
    if real.all() and not any(types):
        return None
    first = np.where(real, np.cumsum(real) - 1, -1).astype(np.int32)
    kinds = np.asarray(types, np.int32) if types else np.zeros_like(first)
    return ExpandedPrompt(tokens, positions=np.stack([first, first + kinds, first]).astype("<i4").tobytes())
