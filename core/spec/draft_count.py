"""How many drafts pay: measured seconds of steps against measured acceptance. Torch-free.

A step of n tokens verifies drafts in the time by which it is longer than one without them. On a device whose launches
wait for the weights that is little; for many rows it is as long as the drafts' own share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

FIRST_RATE = 0.7
"""Assumed probability that a draft is accepted, before any was verified."""

RATE_WEIGHT = 0.15
"""Weight of one verified draft in the mean of its place."""

RETRY = 48
"""Proposals that are skipped before one is verified again, so that a better text is noticed."""

TRIAL = 12
"""One of this many proposals of a draft model uses the mode that was accepted less often."""

TIME_WEIGHT = 0.2
"""Weight of a new duration in a mean."""

LEAP = 4.0
"""A duration counts at most this many times its mean, since a stalled step is no evidence for the next."""

SLOPE = 0.04
"""Assumed growth of a step's duration for each further token, relative to one token, before it was measured."""

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens whose durations are kept; others count to the next smaller one."""


@dataclass(slots=True)
class AcceptanceRates:
    """How often the drafts of one sequence are accepted at each place, given that those before are accepted.

    Args:
        most: largest number of drafts.
    """

    most: int
    rates: list[float] = field(default_factory=list)
    skipped: int = 0
    """Proposals since the last one that was verified."""

    def rate(self, place: int) -> float:
        """Returns the probability of the draft at ``place``, from 0; places never verified have that before them."""
        if place < len(self.rates):
            return self.rates[place]
        return self.rates[-1] if self.rates else FIRST_RATE

    def learn(self, drafted: int, accepted: int) -> None:
        """Updates the means: the first ``accepted`` of ``drafted`` ids were accepted."""
        self.skipped = 0
        for place in range(min(accepted + 1, drafted)):
            before = self.rate(place)
            if place == len(self.rates):
                self.rates.append(before)
            self.rates[place] = before + RATE_WEIGHT * ((place < accepted) - before)

    def gains(self, count: int) -> list[float]:
        """Returns the expected number of accepted ids of 1, 2, ... ``count`` drafts."""
        found, whole, chance = [], 0.0, 1.0
        for place in range(count):
            chance *= self.rate(place)
            whole += chance
            found.append(whole)
        return found


@dataclass(slots=True)
class DraftModes:
    """Chooses how a model drafts for one sequence that samples: its likeliest ids, or ids drawn with the random
    numbers of the target's tokens. The mode that was accepted more often is used.
    """

    shares: list[float] = field(default_factory=lambda: [FIRST_RATE, FIRST_RATE])
    asked: int = 0
    drawn: bool = False

    def choose(self) -> bool:
        """Returns True if the next drafts are drawn; now and then the other way is tried."""
        self.asked += 1
        better = self.shares[True] >= self.shares[False]
        self.drawn = better if self.asked % TRIAL else not better
        return self.drawn

    def learn(self, drafted: int, accepted: int) -> None:
        """Updates the mean share of accepted drafts of the way that was chosen last."""
        before = self.shares[self.drawn]
        self.shares[self.drawn] = before + RATE_WEIGHT * (accepted / drafted - before)


class StepSeconds:
    """Mean durations of steps without prompts, by their number of tokens.

    Args:
        slope: growth of the duration for each further token relative to one token, where nothing was measured.
    """

    def __init__(self, slope: float = SLOPE) -> None:
        self._slope = slope
        self._seconds: dict[int, float] = {}

    @property
    def measured(self) -> bool:
        """True if durations are seconds."""
        return bool(self._seconds)

    def learn(self, tokens: int, seconds: float) -> None:
        """Updates the mean of steps of this size."""
        if seconds <= 0 or tokens < 1:
            return
        at = bisect_right(SIZES, tokens) - 1
        known = self._seconds.get(at)
        seconds /= 1 + self._slope * (tokens - SIZES[at])
        if known is not None:
            seconds = known + TIME_WEIGHT * (min(seconds, LEAP * known) - known)
        self._seconds[at] = seconds

    def estimate(self, tokens: int) -> float:
        """Returns the relative or, once measured, absolute duration of a step of ``tokens`` tokens.

        Sizes that were not measured are scaled from the nearest measured one. A larger step never counts as shorter.
        """
        model = 1 + self._slope * (tokens - 1)
        if not self._seconds:
            return model
        at = bisect_right(SIZES, tokens) - 1
        near, shorter = -1, 0.0
        for one, seconds in self._seconds.items():
            if near < 0 or (abs(one - at), one) < (abs(near - at), near):
                near = one
            if one < at:
                shorter = max(shorter, seconds)
        return max(self._seconds[near] * model / (1 + self._slope * (SIZES[near] - 1)), shorter)

    def ratio(self, tokens: int, more: int) -> float:
        """Returns by which factor ``more`` further tokens lengthen a step of ``tokens`` tokens; at least 1."""
        return max(self.estimate(tokens + more) / self.estimate(tokens), 1.0)


@dataclass(frozen=True, slots=True)
class VerifyShapes:
    """Computes the padded tokens of a step's text launches on a device with planned shapes.

    A launch of VERIFY costs the same for one draft as for all that fit in it.

    Args:
        decode, verify: rows of the planned launches, ascending.
        width: tokens of a row of VERIFY.
        mixed: all rows of a step share one launch; False: rows without drafts have a launch of their own.
    """

    decode: tuple[int, ...]
    verify: tuple[int, ...]
    width: int
    mixed: bool

    def count_tokens(self, rows: int, verified: int) -> int:
        """Returns the tokens of a step of ``rows`` rows, ``verified`` of them with drafts, padding included."""
        if not verified:
            return _pad(self.decode, rows)
        if self.mixed:
            return _pad(self.verify, rows) * self.width
        rest = _pad(self.decode, rows - verified) if rows > verified else 0
        return _pad(self.verify, verified) * self.width + rest


def _pad(sizes: tuple[int, ...], rows: int) -> int:
    """Returns the smallest of ``sizes`` that holds ``rows``; ``rows`` if none does."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else rows


def pays_together(
    seconds: StepSeconds, plain: int, verified: int, expected: float, gains: float, making: float = 0.0
) -> bool:
    """Returns True if a step that verifies drafts gives more tokens a second than one without.

    Args:
        plain, verified: tokens that both compute, padding included.
        expected: ids that the step draws without drafts; ``gains``: those that are accepted in addition.
        making: seconds that the drafts take to be made.
    """
    made = making / seconds.estimate(plain) if making and seconds.measured else 0.0
    return (expected + gains) / (seconds.ratio(plain, max(verified - plain, 0)) + made) > expected


def choose_count(
    rates: AcceptanceRates, seconds: StepSeconds, most: int, tokens: int, expected: float, each: float = 0.0
) -> int:
    """Returns how many of ``most`` drafts give the step most tokens a second; 0: none pays.

    Args:
        tokens: tokens of the step without them; ``expected``: the tokens that it draws and accepts without them.
        each: seconds that a draft takes to be made.
    """
    best, found, plain = expected, 0, seconds.estimate(tokens)
    making = each / plain if each and seconds.measured else 0.0
    for count, gain in enumerate(rates.gains(most), 1):
        longer = max(seconds.estimate(tokens + count) / plain, 1.0)
        speed = (expected + gain) / (longer + count * making)
        if speed > best:
            best, found = speed, count
    if found:
        return found
    rates.skipped += 1
    return 1 if most and rates.skipped >= RETRY else 0
