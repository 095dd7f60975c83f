"""Videos whose temporal patches stand apart in a prompt, each behind its time in words. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.kv.spans import MediaSpan
from trencadis.multimodal.placeholders import Encode
from trencadis.multimodal.processor import Prepared
from trencadis.multimodal.videos.items import Media, PreparedVideo


def spoken_times(video: PreparedVideo) -> list[str]:
    """The time of each temporal patch, in the middle of its two frames, as the model reads it."""
    seconds = [index / video.rate for index in video.indices]
    pairs = zip(seconds[::2], seconds[1::2], strict=True)
    return [f"<{(first + second) / 2:.1f} seconds>" for first, second in pairs]


def expand_apart(
    tokens: Sequence[int],
    image_token: int,
    media: Sequence[Media],
    places: Sequence[int],
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
    said, done = iter(times), 0

    def put(item: Prepared, token: int) -> None:
        spans.append(MediaSpan(len(out), item.tokens, item.digest, item.grid, item.slots))
        out.extend([token] * item.tokens)

    for one, place in zip(media, places, strict=True):
        video = isinstance(one, PreparedVideo)
        if not done <= place < len(tokens) or tokens[place] != (video_token if video else image_token):
            raise ValueError(f"place {place} holds no media token, or is out of order")
        marked = video and place > done and (tokens[place - 1], *tokens[place + 1 : place + 2]) == marks
        out += tokens[done : place - 1 if marked else place]
        if isinstance(one, PreparedVideo):
            for patch in one.patches:
                out += [*next(said), marks[0]]
                put(patch, video_token)
                out.append(marks[1])
        else:
            put(one, image_token)
        done = place + (2 if marked else 1)
    out += tokens[done:]
    return out, spans
