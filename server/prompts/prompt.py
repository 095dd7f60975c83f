"""A prompt in the engine's form: ids, media, and how answers to it are parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from trencadis.core.request import Request, SamplingParams
from trencadis.core.structured_outputs import Rule
from trencadis.multimodal.media_timing import MediaTimes
from trencadis.server.prompts.answer_reader import AnswerReader
from trencadis.server.prompts.multimodal_inputs import (
    ExpandedPrompt,
    ImageItem,
    MediaItem,
    VideoItem,
    is_video,
    list_encoder_items,
)
from trencadis.server.text.checkpoint_tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ImageSize:
    """One image of a prompt as the model saw it; boxes in an answer refer to ``width`` x ``height``, in pixels.

    Args:
        grid: patches (t, h, w).
        tokens: placeholder tokens in the prompt.
        original_width: width of the upright image before resizing.
    """

    width: int
    height: int
    grid: tuple[int, int, int]
    tokens: int
    original_width: int
    original_height: int


@dataclass(slots=True)
class Prompt:
    """A prompt as token ids, with its media in prompt order.

    Args:
        reader: makes the parser of each answer; None if answers are content only.
        shown: special tokens that stay in the text for the readers, even if other special tokens are skipped.
        rule: restricts what answers may contain.
        interval: tokens that a streamed piece must collect; the first piece and the last do not wait.
        prediction: ids of a text that the answer may repeat.
    """

    tokens: list[int]
    text: str | None = None
    expanded: ExpandedPrompt | None = None
    media: list[MediaItem] = field(default_factory=list)
    salt: str = ""
    times: MediaTimes = field(default_factory=MediaTimes)
    reader: Callable[[], AnswerReader] | None = None
    shown: frozenset[int] = frozenset()
    rule: Rule | None = None
    interval: int = 1
    prediction: list[int] = field(default_factory=list)

    @property
    def images(self) -> list[ImageItem]:
        """The images among the media."""
        return [cast(ImageItem, m) for m in self.media if not is_video(m)]

    @property
    def clips(self) -> list[VideoItem]:
        """The videos among the media."""
        return [cast(VideoItem, m) for m in self.media if is_video(m)]

    def count_media_tokens(self, videos: bool) -> int:
        """Returns the number of placeholder tokens of all videos, or of all images."""
        return sum(m.tokens for m in self.media if is_video(m) == videos)

    @property
    def image_sizes(self) -> list[ImageSize]:
        """Sizes of the images, in order."""
        return [
            ImageSize(p.resized[1], p.resized[0], p.grid, p.tokens, p.original[1], p.original[0]) for p in self.images
        ]

    @property
    def pixels(self) -> list[Any]:
        """uint8 [patches, values of a patch], one array per span: an image or a temporal patch of a video."""
        return [item.pixels for item in list_encoder_items(self.media)]

    def make_request(
        self, id: str, sampling: SamplingParams, *, arrival: float, salt: str = "", priority: int = 0
    ) -> Request:
        """Makes the request for the engine."""
        e, salt = self.expanded or ExpandedPrompt(self.tokens), salt or self.salt
        made = Request(id, self.tokens, sampling, e.spans, e.positions, e.delta, salt, priority, arrival, self.rule)
        made.prediction = self.prediction
        return made


def render_prompt(prompt: Prompt, tokenizer: Tokenizer, most: int | None) -> str:
    """Returns the text of a prompt, special tokens included, with one placeholder for each image or video.

    Args:
        most: most characters of the result; None: all.
    """
    kept: list[int] = []
    at = 0
    spans = () if prompt.expanded is None else prompt.expanded.spans
    for run in sorted(run for span in spans for run in span.list_runs()):
        # Consecutive runs belong to one image.
        beside = 0 < at == run.offset and prompt.tokens[at] == prompt.tokens[at - 1]
        kept += prompt.tokens[at : run.offset + (not beside)]
        at = run.offset + run.length
    # A token has at least one character, except pieces of a character: these make the text shorter than ``most``.
    kept = (kept + prompt.tokens[at:])[:most]
    return tokenizer.decode(kept, skip_special_tokens=False)[:most]
