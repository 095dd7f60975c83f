"""Learns the durations of steps, and limits the prompt chunks in steps with decoding rows accordingly. Pure Python.

The duration of a step of decoding rows is stored by their number, in powers of two. The additional duration of a chunk
is stored by its size, in seconds per unit of work, attention included, so that a chunk late in a prompt is known to
cost more. Sizes are those that the device plans; other sizes would have no known duration, and a new shape would
compile.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Stage

LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Sizes of chunks on devices without planned sizes: numbers of rows that a CPU multiplies without padding."""

RISING, FALLING = 0.5, 0.2
"""Weights of a new duration in a mean: longer ones count more, because the mean is used for a bound."""

LEAP = 8.0
"""A duration counts at most this many times its mean, because a stalled step is no evidence for the next."""

RECOVERY = 0.1
"""If a larger chunk size is measured slower per unit than a smaller one, it is treated as noise and moves towards
the smaller by this fraction.
"""


@dataclass(slots=True)
class StepWork:
    """The work of a step: decoding ``rows``, ``tokens`` of prompts (amounting to ``work``), and ``slots`` of images."""

    rows: int
    tokens: int = 0
    work: float = 0.0
    slots: int = 0
    began: float = 0.0


@dataclass(slots=True)
class StepTimes:
    """Mean durations of steps in seconds, and the latency bound of steps with decoding rows.

    Args:
        target: most seconds that a decoding row may wait for its next token.
        sizes: ascending sizes of chunks.
        mixed: True if prompts and decoding rows share a launch, whose planned size holds both.
        pair: one attended pair of query and key, in units of a token's linear operations.
    """

    target: float
    sizes: tuple[int, ...] = LADDER
    mixed: bool = True
    pair: float = 0.0
    decode: dict[int, float] = field(default_factory=dict)
    units: dict[int, float] = field(default_factory=dict)
    slot: float = 0.0
    last: float = 0.0

    def chunk_budget(self, rows: int, slots: int) -> ChunkBudget:
        """Returns the budget for prompt chunks in a step with ``rows`` decoding rows and ``slots`` image slots."""
        return ChunkBudget(self, rows, self.decoding(rows) + self.slot * slots)

    def work(self, context: int, tokens: int) -> float:
        """Returns the work of ``tokens`` after ``context`` others."""
        return tokens + self.pair * tokens * (context + tokens / 2)

    def decoding(self, rows: int) -> float:
        """Returns the seconds of a step of only ``rows`` decoding rows, or of the nearest known number.

        0 if none is known.
        """
        if not self.decode or not rows:
            return 0.0
        wanted = rows.bit_length()
        return self.decode[min(self.decode, key=lambda known: (abs(known - wanted), known))]

    def size_index(self, tokens: int, rows: int) -> int:
        """Returns the index in ``sizes`` of a launch of ``tokens`` prompt tokens and ``rows`` decoding rows."""
        return min(bisect_left(self.sizes, tokens + rows * self.mixed), len(self.sizes) - 1)

    def unit(self, index: int) -> float | None:
        """Returns the seconds per unit of work in chunks of a size, or of the next smaller or else larger known size.

        None: unknown.
        """
        below = [at for at in self.units if at <= index]
        if below:
            return self.units[max(below)]
        return self.units[min(self.units)] if self.units else None

    def learn(self, did: StepWork, now: float, regular: bool = True) -> None:
        """Updates the averages with a finished step; steps that waited for a compiler (not ``regular``) are ignored.

        A step begins when it is submitted, or when the previous step finished if that was later.
        """
        seconds, self.last = now - max(did.began, self.last), now
        if not regular or seconds <= 0:
            return
        if not did.tokens and not did.slots:
            known = self.decode.get(did.rows.bit_length())
            self.decode[did.rows.bit_length()] = _mean(known, seconds)
            return
        rest = max(seconds - self.decoding(max(did.rows, 1)), 0.05 * seconds)
        if did.slots:
            chunk = (self.unit(self.size_index(did.tokens, did.rows)) or 0.0) * did.work
            self.slot = _mean(self.slot or None, max(rest - chunk, 0.0) / did.slots)
            return
        index = self.size_index(did.tokens, did.rows)
        learned = self.units[index] = _mean(self.units.get(index), rest / did.work)
        for other, unit in self.units.items():
            if other > index and unit > learned:
                self.units[other] = unit + RECOVERY * (learned - unit)


@dataclass(slots=True)
class ChunkBudget:
    """Budget for prompt chunks in one step; unlimited if no row decodes.

    Args:
        base: seconds of the step without prompts.
        tokens, work: amounts used by prompts so far.
    """

    times: StepTimes
    rows: int
    base: float
    tokens: int = 0
    work: float = 0.0

    def fits(self, context: int, wanted: int, least: int = 0) -> int:
        """Returns how many of ``wanted`` tokens after ``context`` others keep the step within its bound.

        The first chunk of a step has at least the smallest planned size, and ``least``, regardless of their cost;
        otherwise a prompt could wait as long as others decode.
        """
        if not self.rows:
            return wanted
        times, beside = self.times, self.rows * self.times.mixed
        for size in reversed(times.sizes):
            count = min(size - beside - self.tokens, wanted)
            if count <= 0:
                break
            unit = times.unit(times.size_index(self.tokens + count, self.rows))
            if unit is None:
                break
            if self.base + unit * (self.work + times.work(context, count)) <= times.target:
                return count if self.tokens else max(count, min(least, wanted))
        return 0 if self.tokens else min(max(self._smallest(), least), wanted)

    def _smallest(self) -> int:
        """Returns the prompt tokens of the smallest launch that holds the decoding rows and a chunk of the smallest
        size.
        """
        sizes, beside = self.times.sizes, self.rows * self.times.mixed
        index = bisect_left(sizes, sizes[0] + beside)
        return sizes[index] - beside if index < len(sizes) else sizes[0]

    def take(self, context: int, tokens: int) -> None:
        """Records that a prompt got ``tokens`` after ``context`` others."""
        self.work += self.times.work(context, tokens)
        self.tokens += tokens

    @property
    def open(self) -> bool:
        """True if another prompt could start in this step."""
        return self.fits(0, self.times.sizes[0]) > 0


def chunk_sizes(plan: Plan, most: int) -> tuple[int, ...]:
    """Returns the sizes of chunks of up to ``most`` tokens: the planned ones, so that no launch is padded."""
    found = {*plan.sizes(Stage.PREFILL), *plan.sizes(Stage.FRESH, 1), *plan.sizes(Stage.CONTEXT)}
    if not found:
        found = {size for size in LADDER if size < most}
        found |= {most, *range(LADDER[-1] * 2, most, LADDER[-1])}
    return tuple(sorted(found))


def _mean(known: float | None, seen: float) -> float:
    if known is None:
        return seen
    return known + (RISING if seen > known else FALLING) * (min(seen, LEAP * known) - known)
