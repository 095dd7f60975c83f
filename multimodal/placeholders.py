"""One image token of the template becomes as many as the picture has; the spans say where."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.request import MediaSpan
from trencadis.multimodal.processor import Prepared


def expand(
    tokens: Sequence[int], image_token: int, prepared: Sequence[Prepared], places: Sequence[int]
) -> tuple[list[int], list[MediaSpan]]:
    """Repeats the image token at each of ``places`` as often as its picture has tokens.

    Args:
        tokens: prompt ids in which each picture is one image token.
        image_token: its id.
        prepared: the pictures, in the order of ``places``.
        places: ascending indices into ``tokens``, from the template; ids are never searched for, because a prompt may
            hold the same id without a picture.

    Returns:
        The expanded ids and one span per picture, by ascending offset.
    """
    if len(prepared) != len(places):
        raise ValueError(f"{len(prepared)} pictures for {len(places)} places")
    out: list[int] = []
    spans: list[MediaSpan] = []
    done = 0
    for picture, place in zip(prepared, places, strict=True):
        if not done <= place < len(tokens) or tokens[place] != image_token:
            raise ValueError(f"place {place} holds no image token, or is out of order")
        out += tokens[done:place]
        spans.append(MediaSpan(len(out), picture.tokens, picture.digest, picture.grid, picture.slots))
        out += [image_token] * picture.tokens
        done = place + 1
    out += tokens[done:]
    return out, spans
