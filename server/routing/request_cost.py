"""The facts of a request from which the router chooses a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Key = int
"""Identifies cached content: the first 8 bytes of a ``BlockHashChain`` key or of an image's arena key, as an
integer.
"""

EVERY_UP_TO, EIGHTH_UP_TO, THEN_EACH = 64, 512, 64
"""Indexed prefix lengths in units: every one up to the first, every 8th up to the second, then every 64th."""


class RoutedImage(NamedTuple):
    """One image of a prompt: the key of its embedding, its VISION slots, and the first token after it."""

    key: Key
    slots: int
    end: int


class RoutedPrefix(NamedTuple):
    """A prefix of a prompt: the key of its last block, and its number of tokens."""

    key: Key
    tokens: int


class RequestCost(NamedTuple):
    """The facts of a request that the router uses.

    Args:
        tokens: number of prompt tokens, placeholders included.
        prefixes: prefixes of the prompt that a replica may hold, ascending.
        images: images of the prompt by ascending offset.
        output: most tokens of the answer.
    """

    tokens: int
    prefixes: Sequence[RoutedPrefix] = ()
    images: Sequence[RoutedImage] = ()
    output: int = 0


def is_indexed_prefix(unit: int) -> bool:
    """True if the prefix of ``unit`` units is stored in the index: lengths are spaced geometrically, to bound keys per
    prompt.

    Neighbouring lengths differ by at most an eighth: the prefix that is found is at most an eighth too short,
    and a request of 128k tokens, in units of 128, has 128 of them. The rule depends on the length alone, so that a
    longer prompt with the same start has the same ones.
    """
    return unit <= EVERY_UP_TO or (unit % 8 == 0 and unit <= EIGHTH_UP_TO) or unit % THEN_EACH == 0
