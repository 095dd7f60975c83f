"""Slot ranges that attend to each other in a packed VISION launch, image by image, if the host may read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trencadis.backends.cpu.attention_plan import Where
from trencadis.core.device.backend import Segments
from trencadis.core.shared_constants import WINDOW_SLOTS


class ImageSpan(NamedTuple):
    """The slots ``queries`` attend to the slots ``keys``; slices if none of their windows is padded."""

    queries: Where
    keys: Where


def find_image_spans(seg: Segments) -> list[ImageSpan]:
    """Returns, for each image, which slots attend to which.

    Padding windows attend to the slots that are not padding.
    """
    segment, real = seg.segment.tolist(), seg.real.tolist()
    found: list[ImageSpan] = []
    first = 0
    for i in range(1, len(segment) + 1):
        if i < len(segment) and segment[i] == segment[first]:
            continue
        if seg.padding_window is not None and bool((seg.padding_window[first:i] > 0).any()):
            found += _split_padding_windows(seg, first, i)
        elif all(count == WINDOW_SLOTS for count in real[first:i]):
            whole = slice(first * WINDOW_SLOTS, i * WINDOW_SLOTS)
            found.append(ImageSpan(whole, whole))
        else:
            inside = _real_slots(seg, first, i)
            where = inside.flatten().nonzero()[:, 0] + first * WINDOW_SLOTS
            found.append(ImageSpan(where, where))
        first = i
    return found


def _real_slots(seg: Segments, first: int, stop: int) -> torch.Tensor:
    """Returns the real slots, bool [windows, 64]."""
    return torch.arange(WINDOW_SLOTS) < seg.real[first:stop, None]


def _split_padding_windows(seg: Segments, first: int, stop: int) -> list[ImageSpan]:
    assert seg.padding_window is not None
    inside, padding = _real_slots(seg, first, stop), seg.padding_window[first:stop, None] > 0
    every, real_slots, padding_slots = (
        some.flatten().nonzero()[:, 0] + first * WINDOW_SLOTS for some in (inside, inside & ~padding, inside & padding)
    )
    return [ImageSpan(real_slots, every), ImageSpan(padding_slots, real_slots)]
