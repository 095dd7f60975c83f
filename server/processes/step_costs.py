"""The cost of a replica's steps in seconds, learned from the launches that its engine reports.

The facts of a request from which the router chooses a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

RECENT = 0.05
"""Least weight of a new launch in a mean; the first ones weigh more, the very first one wholly."""

FULL = 256
"""Tokens, and slots, from which a launch has full weight: a small launch is mostly the fixed cost of a step."""

LEAP = 8.0
"""Limit of a launch as a multiple of the mean: a launch that compiled says nothing about the next one."""

ENOUGH = 4.0
"""Launches of its own from which a replica's mean is used; before that it is the mean of all replicas."""


@dataclass(slots=True)
class StepCosts:
    """Seconds of one replica: per prompt token, per VISION slot, per step, and per decoding row of a step.

    The values at the start stand for a 7B model on one card; only their proportions matter until launches are known,
    because all replicas start with the same.

    Args:
        chunk: prompt tokens of one step at most.
        tokens, slots, steps: observed launches of each kind; a launch smaller than ``FULL`` counts in part.
    """

    token: float = 5e-5
    slot: float = 2e-5
    step: float = 8e-3
    row: float = 5e-5
    chunk: int = 2048
    tokens: float = 0.0
    slots: float = 0.0
    steps: float = 0.0

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Updates the cost of a token from a launch that prefilled ``tokens`` tokens in ``seconds``."""
        if tokens > 0 and seconds > 0:
            weight = min(tokens / FULL, 1.0)
            self.tokens += weight
            self.token = _update_mean(self.token, seconds / tokens, self.tokens, weight)

    def observe_encode(self, slots: int, seconds: float) -> None:
        """Updates the cost of a slot from a launch that encoded images of ``slots`` VISION slots in ``seconds``."""
        if slots > 0 and seconds > 0:
            weight = min(slots / FULL, 1.0)
            self.slots += weight
            self.slot = _update_mean(self.slot, seconds / slots, self.slots, weight)

    def observe_decode(self, rows: int, seconds: float) -> None:
        """Updates the cost of a step and of each row from a decoding launch of ``rows`` rows in ``seconds``."""
        if rows > 0 and seconds > 0:
            self.steps += 1.0
            self.step = _update_mean(self.step, max(seconds - rows * self.row, 0.0), self.steps, 1.0)
            self.row = min(self.row, seconds / rows)


def _update_mean(mean: float, seen: float, count: float, weight: float) -> float:
    """Returns the mean after a launch, the ``count``-th one."""
    return mean + min(max(RECENT, 1.0 / count) * weight, 1.0) * (min(seen, LEAP * mean) - mean)


class ReplicaCosts:
    """Step costs per replica; a replica without enough measurements uses the mean of all.

    Otherwise a replica that has run little would look cheap, or expensive, only because of its start values.
    """

    def __init__(self, replicas: int, chunk: int) -> None:
        self.all = StepCosts(chunk=chunk)
        self.each = [StepCosts(chunk=chunk) for _ in range(replicas)]

    def learn(self, replica: int, stage: str, amount: int, seconds: float) -> None:
        """Updates costs from a launch of ``replica``: ``prefill`` (tokens), ``vision`` (slots) or ``decode`` (rows)."""
        for costs in (self.all, self.each[replica]):
            if stage == "prefill":
                costs.observe_prefill(amount, seconds)
            elif stage == "vision":
                costs.observe_encode(amount, seconds)
            else:
                costs.observe_decode(amount, seconds)
        for costs in self.each:
            if costs.tokens < ENOUGH:
                costs.token = self.all.token
            if costs.slots < ENOUGH:
                costs.slot = self.all.slot
            if costs.steps < ENOUGH:
                costs.step, costs.row = self.all.step, self.all.row


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
