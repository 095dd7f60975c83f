"""The seam to ``multimodal``: pictures of a prompt to placeholder tokens, spans, positions and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from trencadis.core.errors import BadRequest
from trencadis.core.models.config import ModelConfig
from trencadis.core.request import MediaSpan
from trencadis.multimodal.options import NO_SCOPE, MediaPart, MediaScope

if TYPE_CHECKING:
    from trencadis.multimodal.processor import Prepared


class Picture(Protocol):
    """``multimodal.processor.Prepared``, which stays opaque to the joiner's callers."""

    @property
    def pixels(self) -> Any: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...
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


class Images(Protocol):
    """``multimodal.images.ImageFrontend``."""

    async def prepare(self, parts: Sequence[MediaPart], scope: MediaScope = NO_SCOPE) -> Sequence[Picture]:
        """Fetches, decodes, resizes and cuts; raises TrencadisError with the part's path as ``param``."""
        ...


@dataclass(slots=True)
class Expanded:
    """A prompt with its pictures in place."""

    tokens: list[int]
    spans: list[MediaSpan] = field(default_factory=list)
    positions: bytes | None = None
    delta: int = 0


class Joiner(Protocol):
    """Puts pictures into a prompt."""

    def __call__(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> Expanded:
        """``tokens`` holds one image token per picture, at the template's own places."""
        ...


class QwenJoiner:
    """Placeholders and rotary positions of Qwen2.5-VL."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __call__(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> Expanded:
        """See Joiner.

        Raises:
            BadRequest: the template placed another number of images.
        """
        if not pictures:
            return Expanded(list(tokens))
        from trencadis.multimodal.mrope import positions as rotary
        from trencadis.multimodal.placeholders import expand

        image = self._config.image_token
        places = image_places(tokens, image, len(pictures))
        expanded, spans = expand(tokens, image, cast("list[Prepared]", pictures), places)
        vision = self._config.vision
        if vision is None or self._config.text.mrope_section is None:
            return Expanded(expanded, spans)
        positions, delta = rotary(len(expanded), spans, vision.tokens_per_second, vision.merge)
        return Expanded(expanded, spans, positions.astype("<i4").tobytes(), int(delta))


def image_places(tokens: Sequence[int], image: int, count: int) -> list[int]:
    """Indices of the template's image tokens.

    Raises:
        BadRequest: there are not ``count`` of them.
    """
    places = [i for i, token in enumerate(tokens) if token == image]
    if len(places) != count:
        raise BadRequest(f"The chat template placed {len(places)} of {count} images.", param="messages")
    return places
