"""What the router must know of a request to choose a replica for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Key = int
"""What names cached content: the first 8 bytes of a ``BlockHashChain`` key or of an image's arena key, as an
integer.
"""

EVERY_UP_TO, EIGHTH_UP_TO, THEN_EACH = 64, 512, 64
"""Prefixes of every length up to the first are known, of every 8th up to the second, then of every 64th, in units."""


class RoutedImage(NamedTuple):
    """One image of a prompt: the key of its embedding, its VISION slots, and the first token behind it."""

    key: Key
    slots: int
    end: int


class RoutedPrefix(NamedTuple):
    """A start of a prompt: the key of its last block, and its tokens."""

    key: Key
    tokens: int


class RequestCost(NamedTuple):
    """A request as the router sees it.

    Args:
        tokens: of the prompt, placeholders included.
        prefixes: starts of the prompt that a replica may hold, ascending.
        images: by ascending offset.
        output: tokens that the answer may have at most.
    """

    tokens: int
    prefixes: Sequence[RoutedPrefix] = ()
    images: Sequence[RoutedImage] = ()
    output: int = 0


def is_indexed_prefix(unit: int) -> bool:
    """True if the prefix of ``unit`` units is stored in the index: lengths are spaced geometrically, to bound keys per
    prompt.

    Two neighbours differ by at most an eighth of their length: the prefix that is found is at most an eighth too short,
    and a request of 128k tokens, in units of 128, has 128 of them. The rule depends on the length alone, so that a
    longer prompt with the same start has the same ones.
    """
    return unit <= EVERY_UP_TO or (unit % 8 == 0 and unit <= EIGHTH_UP_TO) or unit % THEN_EACH == 0
