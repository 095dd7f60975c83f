"""Searches the buckets with which recorded needs cost least, under a limit of graphs. Pure and deterministic.

Each need is computed in one of the chosen buckets, so this is a choice of K among M candidates with a matrix of costs.
A greedy choice is improved by swaps; a Lagrangian bound says how far it can be from the best one, and small instances
are enumerated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

ENUMERATED = 4000
"""Choices that are tried one by one if no more remain after candidates have been excluded by the bound."""

CACHED = 1 << 15
"""Costs that are read at a time, so that what is computed from them stays in the processor's cache."""

BOUND_ROUNDS = 100
SWAP_ROUNDS = 500


class _Part(NamedTuple):
    """Needs [start, stop) of a table, and the first candidate that holds any of them."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class CostTable:
    """Costs of one group of needs, each with its weight, in each of the group's candidates.

    Args:
        costs: [needs, candidates]; infinite where a candidate does not hold a need.
        forced: [candidates]: candidates that are always chosen. Together they hold every need.
        charges: [candidates]: what choosing a candidate costs once; None: nothing.
    """

    costs: Floats
    forced: NDArray[np.bool_]
    charges: Floats | None = None

    @cached_property
    def fees(self) -> Floats:
        """``charges``, or zeros."""
        return np.zeros(self.costs.shape[1]) if self.charges is None else self.charges

    @cached_property
    def by_candidate(self) -> Floats:
        """``costs`` as [candidates, needs], contiguous: those of a few candidates are read over and over."""
        return np.ascontiguousarray(self.costs.T)

    @cached_property
    def parts(self) -> list[_Part]:
        """The needs in groups of about ``CACHED`` costs."""
        step = max(CACHED // max(self.costs.shape[1], 1), 1)
        starts = range(0, len(self.costs), step)
        ends = (min(start + step, len(self.costs)) for start in starts)
        return [_Part(a, b, self._find_first(a, b)) for a, b in zip(starts, ends, strict=True)]

    def _find_first(self, start: int, stop: int) -> int:
        """Returns the first candidate that holds any of the needs [start, stop)."""
        return int(np.isfinite(self.costs[start:stop]).any(axis=0).argmax())


@dataclass(frozen=True)
class PoolLimit:
    """A limit of the bytes of the chosen candidates of some groups together.

    Args:
        bytes: by number of the group, the bytes of its candidates [candidates].
        limit: most bytes; forced candidates are chosen even above it.
    """

    bytes: Mapping[int, Floats]
    limit: float


@dataclass(frozen=True)
class SearchResult:
    """Chosen candidates of each group, their cost, and a lower bound of the cost of every choice of as many."""

    chosen: tuple[tuple[int, ...], ...]
    cost: float
    bound: float


def search_choice(
    tables: Sequence[CostTable], count: int, pools: Sequence[PoolLimit] = (), rounds: int = BOUND_ROUNDS
) -> SearchResult:
    """Chooses at most ``count`` candidates of all groups together, the forced ones included, with the least cost.

    Where they take more bytes than a pool has, those go whose loss costs least for their bytes; the bound is that of a
    choice without such limits.

    Args:
        rounds: most rounds in which the bound is raised.

    Raises:
        ValueError: more than ``count`` candidates are forced.
    """
    forced = sum(int(t.forced.sum()) for t in tables)
    if forced > count:
        raise ValueError(f"at least {forced} candidates are needed")
    best = _Selection(tables)
    best.fill(count)
    best.swap()
    bound, price, better = _raise_bound(tables, best, count, rounds)
    if better.cost() < best.cost():
        better.swap()
        best = better if better.cost() < best.cost() else best
    if any([best.shrink(pool) for pool in pools]):
        return SearchResult(tuple(tuple(sorted(c)) for c in best.chosen), best.cost(), min(bound, best.cost()))
    chosen, cost = _enumerate(tables, best, bound, price, count)
    if any(_bytes(pool, chosen) > pool.limit for pool in pools):
        return SearchResult(tuple(tuple(sorted(c)) for c in best.chosen), best.cost(), min(bound, best.cost()))
    exact = cost is not None
    final = best.cost() if cost is None else cost
    return SearchResult(tuple(tuple(sorted(c)) for c in chosen), final, final if exact else min(bound, final))


def cost_of(tables: Sequence[CostTable], chosen: Sequence[Sequence[int]]) -> float:
    """Returns the cost of all needs, each in its cheapest chosen candidate, and the charges of these."""
    return float(sum(_least(t, c).sum() + _charges(t, c) for t, c in zip(tables, chosen, strict=True)))


def _bytes(pool: PoolLimit, chosen: Sequence[Collection[int]]) -> float:
    return sum(float(sizes[sorted(chosen[g])].sum()) for g, sizes in pool.bytes.items())


def _charges(table: CostTable, chosen: Collection[int]) -> float:
    return 0.0 if table.charges is None else float(table.charges[sorted(chosen)].sum())


def _least(table: CostTable, chosen: Sequence[int]) -> Floats:
    return table.by_candidate[sorted(chosen)].min(axis=0) if chosen else np.full(len(table.costs), np.inf)


def _gains(table: CostTable, prices: Floats) -> Floats:
    """Returns for each candidate by how much it undercuts ``prices`` of the needs, summed, less its charge."""
    if not len(table.costs):
        return -table.fees
    found = np.zeros((table.parts[0].stop + 1, table.costs.shape[1]))  # the first row has the sum so far
    for start, stop, first in table.parts:
        part = found[: stop - start + 1, first:]
        np.subtract(prices[start:stop, None], table.costs[start:stop, first:], out=part[1:])
        np.maximum(part[1:], 0.0, out=part[1:])
        part[0] = part.sum(axis=0)
    gains: Floats = found[0] - table.fees
    return gains


class _Loss(NamedTuple):
    """By how much the cost grows without a chosen candidate."""

    cost: float
    group: int
    candidate: int


class _Change(NamedTuple):
    """By how much the cost grows if one candidate leaves and another enters; -1: none does."""

    cost: float
    left: int = 0
    removed: int = -1
    group: int = 0
    added: int = -1


class _Bound(NamedTuple):
    """The best lower bound found, the prices of needs that give it, and the best choice met on the way."""

    cost: float
    prices: list[Floats]
    met: _Selection


class _Selection:
    """A choice that grows and swaps; ``gains`` are kept for each group, since a change touches one group only."""

    def __init__(self, tables: Sequence[CostTable], chosen: Sequence[Sequence[int]] | None = None) -> None:
        self.tables = tables
        start = [np.flatnonzero(t.forced).tolist() for t in tables] if chosen is None else chosen
        self.chosen: list[set[int]] = [set(c) for c in start]
        self.least = [_least(t, sorted(c)) for t, c in zip(tables, self.chosen, strict=True)]
        self.gains = [_gains(t, costs) for t, costs in zip(tables, self.least, strict=True)]

    def cost(self) -> float:
        charges = sum(_charges(t, c) for t, c in zip(self.tables, self.chosen, strict=True))
        return float(sum(costs.sum() for costs in self.least)) + charges

    def count(self) -> int:
        return sum(map(len, self.chosen))

    def _update(self, g: int, added: int = -1) -> None:
        """Renews the costs of a group's needs, and the gains by the needs whose cost has changed.

        Args:
            added: the candidate by which the choice has grown; -1: it has changed in another way.
        """
        table, before = self.tables[g], self.least[g]
        costs = _least(table, sorted(self.chosen[g])) if added < 0 else np.minimum(before, table.by_candidate[added])
        after = self.least[g] = costs
        changed = np.flatnonzero(before != after)
        old, new = before[changed], after[changed]
        if 3 * len(changed) > len(after) or not np.isfinite(old).all() or not np.isfinite(new).all():
            self.gains[g] = _gains(table, after)
        elif len(changed):
            part = table.costs[changed]
            more = np.maximum(new[:, None] - part, 0.0) - np.maximum(old[:, None] - part, 0.0)
            self.gains[g] = self.gains[g] + more.sum(axis=0)

    def add_best(self) -> bool:
        """Adds the candidate that saves most; False if none saves anything."""
        tops = [(float(gains.max()), -g) for g, gains in enumerate(self.gains) if len(gains)]
        most, g = max(tops, default=(0.0, 0))
        if most <= 1e-9:
            return False
        added = int(self.gains[-g].argmax())
        self.chosen[-g].add(added)
        self._update(-g, added)
        return True

    def fill(self, count: int) -> None:
        """Adds candidates until ``count`` are chosen or no other one saves anything."""
        while self.count() < count and self.add_best():
            pass

    def losses(self) -> list[_Loss]:
        """Returns the loss of each chosen candidate that is not forced, less its charge, ascending."""
        found: list[_Loss] = []
        for g, table in enumerate(self.tables):
            order, fees = sorted(self.chosen[g]), table.fees
            if len(order) < 2 or not len(table.costs):
                found += [_Loss(-fees[j], g, j) for j in order if not table.forced[j]] if not len(table.costs) else []
                continue
            part = table.costs[:, order]
            two = np.partition(part, 1, axis=1)[:, :2]
            own = part.argmin(axis=1)
            lost = np.bincount(own, weights=two[:, 1] - two[:, 0], minlength=len(order))
            found += [_Loss(float(lost[k] - fees[j]), g, j) for k, j in enumerate(order) if not table.forced[j]]
        return sorted(found)

    def swap(self) -> None:
        """Replaces one candidate by another, or drops one, as long as that lowers the cost; the best change first."""
        pairs: list[_Change | None] = [None] * len(self.tables)
        for _ in range(SWAP_ROUNDS):
            found = [self._best_pair(g) if pair is None else pair for g, pair in enumerate(pairs)]
            change = min([*found, *self._changes_across()])
            if change.cost > -1e-9 * max(abs(self.cost()), 1.0):
                return
            pairs = list(found)
            for g, out, entering in ((change.left, change.removed, -1), (change.group, -1, change.added)):
                if out >= 0:
                    self.chosen[g].remove(out)
                if entering >= 0:
                    self.chosen[g].add(entering)
                if out >= 0 or entering >= 0:
                    self._update(g, -1 if out >= 0 else entering)
                    pairs[g] = None

    def _best_pair(self, g: int) -> _Change:
        """Returns the best exchange of two candidates of one group.

        A need whose candidate leaves takes the new one or its second best; all others take the new one if it is
        cheaper.
        """
        table, order = self.tables[g], sorted(self.chosen[g])
        free = [k for k, j in enumerate(order) if not table.forced[j]]
        if not free or not len(table.costs):
            return _Change(0.0)
        part = table.costs[:, order]
        own = part.argmin(axis=1)
        first, second = np.partition(part, 1, axis=1)[:, :2].T if len(order) > 1 else (part[:, 0], part[:, 0])
        by_own = np.argsort(own, kind="stable")
        starts = np.searchsorted(own[by_own], np.arange(len(order)))
        bounds = first[by_own, None], second[by_own, None]
        lost = table.costs[by_own]
        np.clip(lost, *bounds, out=lost)
        lost -= bounds[0]
        used = np.flatnonzero(np.bincount(own, minlength=len(order)))
        sums = np.zeros((len(order), table.costs.shape[1]))
        sums[used] = np.add.reduceat(lost, starts[used], axis=0)
        deltas = sums[free] - self.gains[g][None, :] - table.fees[order][free][:, None]
        deltas[:, order] = np.inf
        row, entering = np.unravel_index(int(deltas.argmin()), deltas.shape)
        return _Change(float(deltas[row, entering]), g, order[free[int(row)]], g, int(entering))

    def _changes_across(self) -> list[_Change]:
        """Returns the best exchange between different groups, and the best drop of a candidate."""
        losses = self.losses()
        tops = sorted((-float(gains.max()), g) for g, gains in enumerate(self.gains) if len(gains))
        found = [_Change(loss.cost, loss.group, loss.candidate) for loss in losses[:1]]
        for g in range(len(self.tables)):
            loss = next((one for one in losses if one.group == g), None)
            other = next(((-gain, h) for gain, h in tops if h != g), None)
            if loss is not None and other is not None:
                gain, h = other
                found.append(_Change(loss.cost - gain, g, loss.candidate, h, int(self.gains[h].argmax())))
        return found

    def shrink(self, pool: PoolLimit) -> bool:
        """Drops candidates until the others fit a pool; True if any was dropped."""
        dropped = False
        while _bytes(pool, self.chosen) > pool.limit:
            losses = [loss for loss in self.losses() if loss.group in pool.bytes]
            sized = [(loss.cost / max(pool.bytes[loss.group][loss.candidate], 1.0), loss) for loss in losses]
            if not sized:
                return dropped
            loss = min(sized)[1]
            self.chosen[loss.group].remove(loss.candidate)
            self._update(loss.group)
            dropped = True
        return dropped


def _raise_bound(tables: Sequence[CostTable], best: _Selection, count: int, rounds: int) -> _Bound:
    """Returns the best lower bound found.

    If every need may cost at most its price, the choice of candidates that undercut the prices most is independent of
    each other, and its cost is a bound. Prices move by subgradients.
    """
    prices = [np.array(costs) for costs in best.least]
    kept, top, met, step = [p.copy() for p in prices], -math.inf, best, 1.0
    upper, stale = best.cost(), 0
    for _ in range(rounds):
        gains = [_gains(t, p) for t, p in zip(tables, prices, strict=True)]
        chosen = _most_gain(tables, gains, count)
        bound = float(sum(p.sum() for p in prices)) - sum(float(g[c].sum()) for g, c in zip(gains, chosen, strict=True))
        if bound > top + 1e-6 * abs(upper):
            stale = 0
        else:
            stale += 1
        if bound > top:
            top, kept = bound, [p.copy() for p in prices]
        if cost_of(tables, chosen) < met.cost():
            met = _Selection(tables, chosen)
        upper = min(upper, met.cost())
        if stale >= 6:
            step, stale, prices = step / 2, 0, [p.copy() for p in kept]
        slopes = [1.0 - (t.by_candidate[c] < p).sum(axis=0) for t, p, c in zip(tables, prices, chosen, strict=True)]
        norm = float(sum((s * s).sum() for s in slopes))
        if norm == 0 or step < 1e-3 or upper - top <= 1e-9 * abs(upper):
            break
        move = step * max(upper - bound, 1e-9) / norm
        prices = [np.maximum(p + move * s, 0.0) for p, s in zip(prices, slopes, strict=True)]
    return _Bound(top, kept, met)


def _most_gain(tables: Sequence[CostTable], gains: Sequence[Floats], count: int) -> list[list[int]]:
    """Returns the forced candidates and those others that gain most, ``count`` in all."""
    chosen = [np.flatnonzero(t.forced).tolist() for t in tables]
    free = [
        (-float(gains[g][j]), g, int(j))
        for g, t in enumerate(tables)
        for j in np.flatnonzero(~t.forced & (gains[g] > 0))
    ]
    for _, g, j in sorted(free)[: count - sum(map(len, chosen))]:
        chosen[g].append(j)
    return [sorted(c) for c in chosen]


def _enumerate(
    tables: Sequence[CostTable], best: _Selection, bound: float, prices: Sequence[Floats], count: int
) -> tuple[list[set[int]], float | None]:
    """Returns the best choice and its cost, if few choices remain that the bound does not exclude; else ``best``, None.

    A choice with a candidate of less gain than the last one taken costs at least the bound plus the difference. With
    charges, fewer candidates than ``count`` may be best; one that gains less than its charge is then not taken.
    """
    cost = best.cost()
    charged = any(t.charges is not None for t in tables)
    gains = [_gains(t, p) for t, p in zip(tables, prices, strict=True)]
    free = sorted((-float(gains[g][j]), g, int(j)) for g, t in enumerate(tables) for j in np.flatnonzero(~t.forced))
    left = count - sum(int(t.forced.sum()) for t in tables)
    if left >= len(free) and not charged:
        everything = [set(range(t.costs.shape[1])) for t in tables]
        return everything, cost_of(tables, [sorted(c) for c in everything])
    if not left:
        return best.chosen, cost
    last, following = (max(-free[at][0], 0.0) if at < len(free) else 0.0 for at in (left - 1, left))
    slack = 1e-9 * max(abs(cost), 1.0)
    fixed = [f for f in free[:left] if bound + (-f[0] - following) > cost + slack]
    open_ = [f for f in free[:left] if f not in fixed]
    open_ += [f for f in free[left:] if bound + (last + f[0]) <= cost + slack]
    sizes = range(left - len(fixed) + 1) if charged else (left - len(fixed),)
    if sum(math.comb(len(open_), size) for size in sizes) > ENUMERATED:
        return best.chosen, None
    found = best.chosen
    for some in itertools.chain.from_iterable(itertools.combinations(open_, size) for size in sizes):
        chosen = [set(np.flatnonzero(t.forced).tolist()) for t in tables]
        for _, g, j in (*fixed, *some):
            chosen[g].add(j)
        total = cost_of(tables, [sorted(c) for c in chosen])
        if total < cost - slack:
            cost, found = total, chosen
    return found, cost
