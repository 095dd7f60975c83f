"""Videos whose temporal patches follow a text timestamp each. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.kv.media_spans import MediaSpan
from trencadis.multimodal.placeholders import Encode
from trencadis.multimodal.processor import PreparedImage
from trencadis.multimodal.videos.prepared_video import Media, PreparedVideo


def format_timestamps(video: PreparedVideo) -> list[str]:
    """Returns the timestamp text of each temporal patch, the middle of its two frames."""
    seconds = [index / video.rate for index in video.indices]
    pairs = zip(seconds[::2], seconds[1::2], strict=True)
    return [f"<{(first + second) / 2:.1f} seconds>" for first, second in pairs]


def expand_with_timestamps(
    tokens: Sequence[int],
    image_token: int,
    media: Sequence[Media],
    positions: Sequence[int],
    video_token: int = -1,
    encode: Encode | None = None,
    times: Sequence[Sequence[int]] = (),
    marks: tuple[int, int] = (-1, -1),
) -> tuple[list[int], list[MediaSpan]]:
    """``placeholders.expand_placeholders``, with a video's temporal patches apart.

    Args:
        times: ids of what is said before each temporal patch of all videos, in order.
        marks: ids before and behind each of them. Where they stand around a video's own token they are dropped.

    Raises:
        ValueError: as there.
    """
    out: list[int] = []
    spans: list[MediaSpan] = []
    timestamps, done = iter(times), 0

    def put(item: PreparedImage, token: int) -> None:
        spans.append(MediaSpan(len(out), item.tokens, item.digest, item.grid, item.slots))
        out.extend([token] * item.tokens)

    for one, position in zip(media, positions, strict=True):
        video = isinstance(one, PreparedVideo)
        if not done <= position < len(tokens) or tokens[position] != (video_token if video else image_token):
            raise ValueError(f"place {position} holds no media token, or is out of order")
        marked = video and position > done and (tokens[position - 1], *tokens[position + 1 : position + 2]) == marks
        out += tokens[done : position - 1 if marked else position]
        if isinstance(one, PreparedVideo):
            for patch in one.patches:
                out += [*next(timestamps), marks[0]]
                put(patch, video_token)
                out.append(marks[1])
        else:
            put(one, image_token)
        done = position + (2 if marked else 1)
    out += tokens[done:]
    return out, spans
