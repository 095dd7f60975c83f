"""Which tokens attend to which pictures of their request. Pure.

As the authors' code masks them: pictures that stand beside each other are a group. A token attends to what the pictures
of the last group at or before its place show; the tokens of the group itself to those that stand up to their own place.
Tokens before the first picture attend to all rows of all pictures, also those that a picture leaves empty, and the MLP
of such layers is left out for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.kv.spans import MediaSpan
from trencadis.core.layout import RESERVED_ROWS
from trencadis.core.shapes.seen import ENDLESS, SeenPicture, Sight


def ends(places: Sequence[int]) -> list[int]:
    """Behind the last token that attends to the picture at each of the ascending ``places``."""
    found = [ENDLESS] * len(places)
    for i in reversed(range(len(places) - 1)):
        found[i] = found[i + 1] if places[i] + 1 == places[i + 1] else places[i + 1]
    return found


def sight(spans: Sequence[MediaSpan], first: Sequence[int], start: int, stop: int) -> Sight:
    """What tokens [start, stop) of a request see; ``first``: the first arena row of each span's picture."""
    places = [span.runs[0].offset for span in spans]
    silent = min(max(places[0] - start, 0), stop - start)
    units = [(row - RESERVED_ROWS) // span.held for span, row in zip(spans, first, strict=True)]
    seen = [SeenPicture(0, silent, unit, span.held) for span, unit in zip(spans, units, strict=True) if silent]
    for span, unit, place, end in zip(spans, units, places, ends(places), strict=True):
        if place < stop and end > start:
            seen.append(SeenPicture(max(place, start) - start, min(end, stop) - start, unit, span.shown))
    return Sight(tuple(seen), silent)
