"""Expands videos whose temporal patches are each preceded by a timestamp in text. Torch-free."""

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
    """Expands placeholders as ``placeholders.expand_placeholders``, but each temporal patch of a video separately.

    Args:
        times: ids of the timestamp text before each temporal patch of all videos, in order.
        marks: ids before and after each temporal patch. If they surround a video's placeholder in ``tokens``, those are
            dropped.

    Raises:
        ValueError: as ``expand_placeholders``.
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
