"""What a request asks of a replica, as far as it matters for the choice among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Key = int
"""What names cached content: the first 8 bytes of a ``Chain`` key or of a picture's arena key, as an integer."""

EVERY, EIGHTH, SIXTY_FOURTH = 64, 512, 64
"""Prefixes are known at each unit up to EVERY, at each 8th up to EIGHTH, then at each SIXTY_FOURTH."""


class Picture(NamedTuple):
    """One image of a prompt: the key of its embedding, its VISION slots, and the first token behind it."""

    key: Key
    slots: int
    end: int


class Prefix(NamedTuple):
    """A start of a prompt: the key of its last block, and its tokens."""

    key: Key
    tokens: int


class Demand(NamedTuple):
    """A request as the router sees it.

    Args:
        tokens: of the prompt, placeholders included.
        prefixes: starts of the prompt that a replica may hold, ascending.
        pictures: by ascending offset.
        output: tokens that the answer may have at most.
    """

    tokens: int
    prefixes: Sequence[Prefix] = ()
    pictures: Sequence[Picture] = ()
    output: int = 0


def anchored(unit: int) -> bool:
    """Whether a prefix of that many units is kept in the index.

    The distance of two such prefixes is at most an eighth of their length, so a request of 128k tokens has 128 of them
    where a unit is 128 tokens, and what is found is too short by an eighth at most. The rule looks at the length alone:
    a longer prompt with the same start has the same ones.
    """
    return unit <= EVERY or (unit % 8 == 0 and unit <= EIGHTH) or unit % SIXTY_FOURTH == 0
