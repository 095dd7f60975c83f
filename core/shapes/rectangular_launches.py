"""Splits rows into rectangular launches by cost. Pure Python.

A FRESH launch computes several prompts without context, a CONTEXT launch one row after its context, a DECODE launch one
token of many rows, a VERIFY launch the last token and the drafts of many rows. ``policy.cost`` chooses among planned
buckets; one launch per row is always an option, so that no split costs more. A row never runs before a row that writes
its blocks: FRESH reads no context, CONTEXT and DECODE keep the order of the Step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage, verify_variant

Spans = Sequence[tuple[int, int]]
"""Tokens [start, stop) that must stay in one launch, ascending."""

NONE = float("inf")
ALL_GROUPS = 16
"""All group sizes up to this one are tried, above it only those in the plan."""


class RowNeed(NamedTuple):
    """One row: its index in the Step, the tokens already in the cache, and the tokens to compute.

    ``spans``: which of these tokens, (start, stop) ascending, must stay in one launch. ``drafted``: all tokens but the
    first are drafts, whose blocks no other row reads.
    """

    row: int
    context: int
    tokens: int
    spans: Spans = ()
    drafted: bool = False


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Tokens [start, stop) of a row's chunk."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RectangularLaunch:
    """One launch: its bucket and its pieces."""

    bucket: Bucket
    pieces: tuple[RowPiece, ...]


def split_rows(needs: Sequence[RowNeed], plan: Plan) -> list[RectangularLaunch]:
    """Returns the launches of ``needs``: FRESH, then CONTEXT, then VERIFY and DECODE; the pieces of each row are in
    order.
    """
    cutter = RectangularSplitter(plan)
    # Forced ids before the drafts may make a row longer than those of VERIFY: it is a chunk after its context.
    drafted = [n for n in needs if n.drafted and n.tokens <= plan.drafts + 1]
    if drafted:
        needs = [n for n in needs if n not in drafted]
    fresh: list[RectangularLaunch] = []
    tails: list[tuple[int, list[RectangularLaunch]]] = []
    first = [n for n in needs if n.tokens > 1 and n.context == 0]
    for head, tail in cutter.fresh(first):
        fresh.append(head)
        tails += [(tail[0].pieces[0].row, tail)] if tail else []
    for n in needs:
        if n.tokens > 1 and n.context > 0:
            tails.append((n.row, cutter.context(n, 0)))
    order = {n.row: i for i, n in enumerate(needs)}
    tails.sort(key=lambda t: order[t[0]])
    found = [*fresh, *(c for _, cuts in tails for c in cuts)]
    single = [n for n in needs if n.tokens == 1]
    return found + (cutter.verify(drafted, single) if drafted else cutter.decode(single))


class RectangularSplitter:
    """Splits rows by the buckets of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cost = plan.policy.cost
        self.block = max(plan.block_size, 1)
        self.chunks = plan.sizes(Stage.CONTEXT, 0)

    # Prompts without context

    def fresh(self, needs: Sequence[RowNeed]) -> list[tuple[RectangularLaunch, list[RectangularLaunch]]]:
        """Returns FRESH launches, each with the CONTEXT launches for its remaining tokens.

        Rows are sorted by length, longest first, and neighbours share launches.
        """
        short = sorted((n for n in needs if n.tokens <= self.plan.policy.fresh_tokens), key=lambda n: -n.tokens)
        found = [self.alone(n)[1] for n in needs if n.tokens > self.plan.policy.fresh_tokens]
        lengths = [n.tokens for n in short]
        alone = [self.alone(n) for n in short]

        def price(start: int, stop: int) -> float:
            if stop - start == 1:
                return alone[start][0]
            bucket = self.plan.find(Stage.FRESH, (stop - start, lengths[start]))
            return NONE if bucket is None else self.cost(bucket)

        for start, stop in best_groups(len(short), price, self.plan.sizes(Stage.FRESH, 0)):
            if stop - start == 1:
                found.append(alone[start][1])
                continue
            bucket = self.plan.fit(Stage.FRESH, (stop - start, lengths[start]))
            found.append(
                (RectangularLaunch(bucket, tuple(RowPiece(n.row, 0, n.tokens) for n in short[start:stop])), [])
            )
        return found

    def alone(self, need: RowNeed) -> tuple[float, tuple[RectangularLaunch, list[RectangularLaunch]]]:
        """Returns cost and launches of a single fresh row: one launch, or a planned size and then the rest, if
        cheaper.
        """
        options: list[tuple[float, int, Bucket]] = []
        whole = self.plan.find(Stage.FRESH, (1, need.tokens))
        if self.plan.whole:
            fitting = whole or self.plan.fit(Stage.FRESH, (1, need.tokens))
            return self.cost(fitting), (RectangularLaunch(fitting, (RowPiece(need.row, 0, need.tokens),)), [])
        if whole is not None:
            options.append((self.cost(whole), 0, whole))
        for planned in self._below(self.plan.sizes(Stage.FRESH, 1), need.tokens, 3 if whole else 1):
            size = uncut(planned, need.spans)
            bucket = self.plan.find(Stage.FRESH, (1, size))
            if bucket is not None and size < need.tokens:
                rest = self.context_price(size, need.tokens - size, shift_spans(need.spans, size))
                options.append((self.cost(bucket) + rest, need.tokens - size, bucket))
        if not options:
            bucket = self.plan.fit(Stage.FRESH, (1, need.tokens))
            options.append((self.cost(bucket), 0, bucket))
        price, rest, bucket = min(options, key=lambda o: o[:2])
        size = need.tokens - rest
        tail = self.context(need, size) if rest else []
        return price, (RectangularLaunch(bucket, (RowPiece(need.row, 0, size),)), tail)

    # One row after its context

    def context(self, need: RowNeed, start: int) -> list[RectangularLaunch]:
        """Returns CONTEXT launches of a row's chunk from token ``start`` on."""
        found, spans = [], shift_spans(need.spans, start)
        for bucket, size in self.context_cuts(need.context + start, need.tokens - start, spans):
            found.append(RectangularLaunch(bucket, (RowPiece(need.row, start, start + size),)))
            start += size
        return found

    def context_price(self, context: int, tokens: int, spans: Spans = ()) -> float:
        """Returns the cost of ``context_cuts``."""
        return sum(self.cost(b) for b, _ in self.context_cuts(context, tokens, spans))

    def context_cuts(self, context: int, tokens: int, spans: Spans = ()) -> list[tuple[Bucket, int]]:
        """Returns (bucket, tokens) of each launch: full launches, then one or two for the rest, whichever is
        cheaper.
        """
        found: list[tuple[Bucket, int]] = []
        most = self.chunks[-1] if self.chunks else tokens
        while tokens > 0:
            size = self._full(context, tokens, most)
            if size >= tokens:
                return found + self._end(context, tokens, spans)
            size = min(uncut(size, spans), tokens)
            found.append((self._fit(context, size), size))
            context, tokens, spans = context + size, tokens - size, shift_spans(spans, size)
        return found

    def _full(self, context: int, tokens: int, most: int) -> int:
        """Returns the tokens of the next launch: all remaining ones if they fit, else the largest planned size that
        fits.
        """
        if tokens <= most and self._find(context, tokens) is not None:
            return tokens
        for size in self._below(self.chunks, tokens, len(self.chunks)):
            if self._find(context, size) is not None:
                return size
        return 1 if tokens > 1 else tokens

    def _end(self, context: int, tokens: int, spans: Spans) -> list[tuple[Bucket, int]]:
        """Returns the last launch, or two if a planned size and then the rest cost less."""
        whole = self._fit(context, tokens)
        best, price = [(whole, tokens)], self.cost(whole)
        for planned in self._below(self.chunks, tokens, 2):
            size = uncut(planned, spans)
            first = self._find(context, size)
            second = self._find(context + size, tokens - size) if size < tokens else None
            if first is not None and second is not None:
                both = self.cost(first) + self.cost(second)
                if both < price:
                    best, price = [(first, size), (second, tokens - size)], both
        return best

    def _find(self, context: int, tokens: int) -> Bucket | None:
        return self.plan.find(*self._need(context, tokens))

    def _fit(self, context: int, tokens: int) -> Bucket:
        return self.plan.fit(*self._need(context, tokens))

    def _need(self, context: int, tokens: int) -> tuple[Stage, tuple[int, int]]:
        if tokens == 1:
            return Stage.DECODE, (1, context // self.block + 1)
        return Stage.CONTEXT, (tokens, -(-context // self.block))

    @staticmethod
    def _below(sizes: Sequence[int], need: int, count: int) -> list[int]:
        """Returns the ``count`` largest sizes below ``need``, descending."""
        return [s for s in sizes if s < need][-count:][::-1]

    # Few tokens of many rows

    def verify(self, drafted: Sequence[RowNeed], single: Sequence[RowNeed]) -> list[RectangularLaunch]:
        """Returns VERIFY launches of the rows with drafts, which the rows of one token join if that costs less."""
        variant = verify_variant(self.plan.drafts + 1)
        split = [*self._in_order(drafted, Stage.VERIFY, variant), *self.decode(single)]
        if not single:
            return split
        joined = self._in_order([*drafted, *single], Stage.VERIFY, variant)
        return min(joined, split, key=lambda launches: sum(self.cost(one.bucket) for one in launches))

    def decode(self, needs: Sequence[RowNeed]) -> list[RectangularLaunch]:
        """Returns DECODE launches in the order of the Step; a single one if no split can cost less."""
        return self._in_order(needs, Stage.DECODE, "") if needs else []

    def _in_order(self, needs: Sequence[RowNeed], stage: Stage, variant: str) -> list[RectangularLaunch]:
        """Returns launches of ``stage`` with all tokens of the rows, neighbours together."""
        totals = [0, *accumulate((n.context + n.tokens - 1) // self.block + 1 for n in needs)]

        table = self.plan.table(stage, variant)

        def price(start: int, stop: int) -> float:
            listed = totals[stop] - totals[start]
            found = table.find_with_cost((stop - start, listed)) if table else None
            if found is not None:
                return found[0]
            return NONE if stop - start > 1 else self.cost(self.plan.fit(stage, (1, listed), variant))

        # No split costs less than two launches without any padding.
        bare = self.cost(Bucket(stage, (0, 0), variant))
        least = self.cost(Bucket(stage, (len(needs), totals[-1]), variant)) + bare
        groups = [(0, len(needs))]
        if len(needs) > 1 and price(0, len(needs)) > least:
            groups = best_groups(len(needs), price, self.plan.sizes(stage, 0), 1)
        found = []
        for start, stop in groups:
            pieces = tuple(RowPiece(n.row, 0, n.tokens) for n in needs[start:stop])
            bucket = self.plan.fit(stage, (stop - start, totals[stop] - totals[start]), variant)
            found.append(RectangularLaunch(bucket, pieces))
        return found


def uncut(size: int, spans: Spans) -> int:
    """Returns at most ``size`` tokens that split no span; if the first token lies inside a span, all of that span."""
    for start, stop in spans:
        if start < size < stop:
            return start if start > 0 else stop
    return size


def shift_spans(spans: Spans, size: int) -> Spans:
    """Returns the spans relative to the token after ``size`` others."""
    return tuple((start - size, stop - size) for start, stop in spans if stop > size)


def best_groups(
    count: int, price: Callable[[int, int], float], sizes: Sequence[int], every: int = ALL_GROUPS
) -> list[tuple[int, int]]:
    """Returns the cheapest split of ``count`` items into consecutive groups [start, stop); on ties, larger groups.

    Tries all group sizes up to ``every``, above that those in ``sizes`` and the whole rest.
    """
    tried = sorted({*range(1, every + 1), *sizes})
    best = [0.0] * (count + 1)
    ends = [0] * (count + 1)
    for start in range(count - 1, -1, -1):
        left = count - start
        best[start] = NONE
        for size in (*(s for s in tried if s < left), left):
            total = price(start, start + size) + best[start + size]
            if total <= best[start]:
                best[start], ends[start] = total, start + size
    groups, start = [], 0
    while start < count:
        groups.append((start, ends[start]))
        start = ends[start]
    return groups
