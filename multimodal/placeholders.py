"""Expands each placeholder token of a prompt to as many tokens as its image or video has."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.request import MediaSpan
from trencadis.multimodal.videos.items import Media, PreparedVideo, encoder_items


def expand_placeholders(
    tokens: Sequence[int], image_token: int, media: Sequence[Media], places: Sequence[int], video_token: int = -1
) -> tuple[list[int], list[MediaSpan]]:
    """Repeats the token at each of ``places`` as often as its image or video has tokens.

    Args:
        tokens: prompt ids in which each image is one image token, each video one video token.
        image_token: id of the image token; ``video_token``: of the video token.
        media: in the order of ``places``.
        places: ascending indices into ``tokens``, from the template. The id is not searched for: text that a user types
            may hold it too.

    Returns:
        The expanded ids, and one span per image or temporal patch (``encoder_items(media)``), by ascending offset.

    Raises:
        ValueError: media and places differ in number, or a place holds no media token or is out of order.
    """
    if len(media) != len(places):
        raise ValueError(f"{len(media)} media for {len(places)} places")
    out: list[int] = []
    spans: list[MediaSpan] = []
    done = 0
    for one, place in zip(media, places, strict=True):
        wanted = video_token if isinstance(one, PreparedVideo) else image_token
        if not done <= place < len(tokens) or tokens[place] != wanted:
            raise ValueError(f"place {place} holds no media token, or is out of order")
        out += tokens[done:place]
        for item in encoder_items([one]):
            spans.append(MediaSpan(len(out), item.tokens, item.digest, item.grid, item.slots))
            out += [wanted] * item.tokens
        done = place + 1
    out += tokens[done:]
    return out, spans
