"""Which slots of a packed VISION launch see which, image by image, where the host may read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trencadis.backends.cpu.plan import Where
from trencadis.core.backend import Segments
from trencadis.core.layout import WINDOW_SLOTS


class Seeing(NamedTuple):
    """Slots ``seers`` attend to the slots ``seen``; slices where none of their windows is padded."""

    seers: Where
    seen: Where


def seeing(seg: Segments) -> list[Seeing]:
    """Real slots of each image; ghosts see those of it that are none."""
    segment, real = seg.segment.tolist(), seg.real.tolist()
    found: list[Seeing] = []
    first = 0
    for i in range(1, len(segment) + 1):
        if i < len(segment) and segment[i] == segment[first]:
            continue
        if seg.ghost is not None and bool((seg.ghost[first:i] > 0).any()):
            found += _haunted(seg, first, i)
        elif all(count == WINDOW_SLOTS for count in real[first:i]):
            whole = slice(first * WINDOW_SLOTS, i * WINDOW_SLOTS)
            found.append(Seeing(whole, whole))
        else:
            inside = _inside(seg, first, i)
            where = inside.flatten().nonzero()[:, 0] + first * WINDOW_SLOTS
            found.append(Seeing(where, where))
        first = i
    return found


def _inside(seg: Segments, first: int, stop: int) -> torch.Tensor:
    """bool [windows, 64]: the real slots."""
    return torch.arange(WINDOW_SLOTS) < seg.real[first:stop, None]


def _haunted(seg: Segments, first: int, stop: int) -> list[Seeing]:
    assert seg.ghost is not None
    inside, ghost = _inside(seg, first, stop), seg.ghost[first:stop, None] > 0
    every, solid, ghosts = (
        some.flatten().nonzero()[:, 0] + first * WINDOW_SLOTS for some in (inside, inside & ~ghost, inside & ghost)
    )
    return [Seeing(solid, every), Seeing(ghosts, solid)]
