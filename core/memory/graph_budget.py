"""Which graphs a budget of bytes buys. Pure; sizes in bytes.

The budget decides what is captured, never what is compiled: a bucket without a graph runs at its padded shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.memory.ledger import POOLS, Division, GraphSettings, pool_of, share
from trencadis.core.units import gib

SPARE = 256 << 20
"""Bytes that stay free beyond a capture, whatever is predicted."""

STRATEGIES = ("min_tokens", "max_bs")


@dataclass(frozen=True)
class Price:
    """What a graph is predicted to cost: ``own`` (inputs, outputs, code) and the workspace of its capture."""

    bucket: Bucket
    own: int
    workspace: int = 0
    gain: float = 1.0

    @property
    def alone(self) -> int:
        """Cost without other graphs."""
        return self.own + self.workspace


def may_start(predicted: int, free: int) -> bool:
    """A capture starts only if 1.5 x its predicted bytes and 256 MiB are free."""
    return 2 * free >= 3 * predicted + 2 * SPARE


def pays(predicted: int, left: int) -> bool:
    """A pool pays for a capture only if it holds the prediction and a tenth."""
    return 10 * left >= 11 * predicted


def rows_of(bucket: Bucket) -> int:
    """Rows of a launch: what ``max_bs`` orders by."""
    if bucket.stage is Stage.PREFILL:
        return bucket.dims[1]
    return 1 if bucket.stage in (Stage.CONTEXT, Stage.VISION) else bucket.dims[0]


def ordered(prices: Iterable[Price], strategy: str) -> list[Price]:
    """Who comes first: ``min_tokens`` the smallest launches, ``max_bs`` the widest, then the smallest."""

    def key(p: Price) -> tuple[object, ...]:
        b = p.bucket
        small = (padded_tokens(b), b.dims[1:], b.stage, b.dims, b.variant)
        return small if strategy == "min_tokens" else (-rows_of(b), *small)

    return sorted(prices, key=key)


def set_cost(prices: Iterable[Price], rule: str) -> int:
    """What a set of graphs costs: every one by itself (``sum``), or one workspace for all of a stage (``max``)."""
    own, works = 0, dict[Stage, list[int]]()
    for p in prices:
        own += p.own
        works.setdefault(p.bucket.stage, []).append(p.workspace)
    return own + sum(max(w) if rule == "max" else sum(w) for w in works.values())


def held_workspace(prices: Iterable[Price]) -> dict[Stage, int]:
    """The workspace that graphs of each stage share."""
    found = dict[Stage, int]()
    for p in prices:
        found[p.bucket.stage] = max(p.workspace, found.get(p.bucket.stage, 0))
    return found


def winners(prices: Iterable[Price], budget: int, strategy: str, rule: str, held: Sequence[Price] = ()) -> list[Price]:
    """The graphs that ``budget`` buys, in order; one that is too dear is passed over, later ones may still fit.

    ``held`` are graphs of the pool that are there already, whose workspace counts under the ``max`` rule.
    """
    taken: list[Price] = []
    work = held_workspace(held) if rule == "max" else {}
    for price in ordered(prices, strategy):
        extra = max(price.workspace - work.get(price.bucket.stage, 0), 0)
        if pays(price.own + extra, budget):
            budget -= price.own + extra
            if rule == "max":
                work[price.bucket.stage] = max(work.get(price.bucket.stage, 0), price.workspace)
            taken.append(price)
    return taken


@dataclass(frozen=True)
class GraphSelection:
    """What is to be captured, by pool, and what that costs; ``missing`` are the buckets that stay compiled only."""

    taken: Mapping[str, tuple[Price, ...]]
    spent: Mapping[str, int]
    missing: tuple[Price, ...] = field(default=())


def choose(prices: Iterable[Price], division: Division, settings: GraphSettings, rule: str) -> GraphSelection:
    """Winners of each pool, then of what is left over: to the pool with most uncaptured gain per byte."""
    by_pool: dict[str, list[Price]] = {pool: [] for pool in POOLS}
    for price in prices:
        by_pool[pool_of(price.bucket.stage)].append(price)
    budgets = division.pools()
    taken: dict[str, list[Price]] = {}
    for pool in POOLS:
        taken[pool] = winners(by_pool[pool], budgets[pool], settings.strategy(pool), rule)
    spent = {pool: set_cost(taken[pool], rule) for pool in POOLS}
    rest = sum(budgets.values()) - sum(spent.values())
    for pool in by_gain(by_pool, taken):
        more = winners(missing(by_pool[pool], taken[pool]), rest, settings.strategy(pool), rule, taken[pool])
        taken[pool] += more
        now = set_cost(taken[pool], rule)
        rest -= now - spent[pool]
        spent[pool] = now
    left = tuple(p for pool in POOLS for p in missing(by_pool[pool], taken[pool]))
    return GraphSelection({pool: tuple(t) for pool, t in taken.items()}, spent, left)


def missing(every: Sequence[Price], taken: Sequence[Price]) -> list[Price]:
    """Those without a graph."""
    got = {p.bucket for p in taken}
    return [p for p in every if p.bucket not in got]


def by_gain(every: Mapping[str, Sequence[Price]], taken: Mapping[str, Sequence[Price]]) -> list[str]:
    """Pools that lack graphs, the one with most uncaptured gain per byte first."""
    rates = {}
    for pool in every:
        open_ = missing(every[pool], taken[pool])
        if open_:
            rates[pool] = sum(p.gain for p in open_) / max(sum(p.alone for p in open_), 1)
    return sorted(rates, key=lambda pool: (-rates[pool], pool))


def predict(bucket: Bucket, exact: int, formula: int, measured: Mapping[Bucket, int]) -> int:
    """Bytes of a graph: its measurement, else inputs and outputs (exact) and the rest by its nearest neighbours.

    The rest is that of the smallest measured bucket of the stage that is no smaller; above all of them the largest's
    grows with the tokens; without any it is ``formula``.
    """
    if bucket in measured:
        return measured[bucket]
    size = padded_tokens(bucket)
    known = sorted((padded_tokens(b), cost) for b, cost in measured.items() if b.stage is bucket.stage)
    if not known:
        return exact + formula
    for tokens, cost in known:
        if tokens >= size:
            return max(cost, exact)
    tokens, cost = known[-1]
    return max(-(-cost * size // tokens), exact)


def prices_by(
    measured: Mapping[Bucket, int], formulas: Sequence[Price], alone: Callable[[Bucket], int], rule: str
) -> list[Price]:
    """``formulas`` where nothing is measured, corrected by what the measured graphs of the stage cost beside theirs.

    Where graphs share memory a measurement holds a workspace or none, as others came before it: they stay as they are.
    ``alone``: any graph's bytes by formula.
    """
    paid, said = Counter[Stage](), Counter[Stage]()
    for bucket, cost in measured.items():
        paid[bucket.stage] += cost
        said[bucket.stage] += alone(bucket)

    def price(p: Price) -> Price:
        stage = p.bucket.stage
        if p.bucket in measured:
            return Price(p.bucket, measured[p.bucket])
        return p if rule == "max" or not said[stage] else Price(p.bucket, -(-p.alone * paid[stage] // said[stage]))

    return [price(p) for p in formulas]


def reserve_that_holds(
    prices: Sequence[Price], division: Division, settings: GraphSettings, rule: str, multimodal: bool, least_kv: int = 0
) -> float | None:
    """The smallest hundredth of VLLM_GRAPH_RESERVED_MEM with which every graph is captured.

    None: there is none that leaves ``least_kv`` bytes to the KV cache.
    """
    for hundredth in range(1, 100):
        graphs = share(division.usable, hundredth / 100)
        if division.usable - graphs < least_kv:
            return None
        if graphs < set_cost(prices, rule):
            continue
        prefill = share(graphs, settings.prompt)
        text = share(prefill, settings.text) if multimodal else prefill
        trial = Division(division.usable, graphs, 0, 0, text, prefill - text, graphs - prefill)
        if not choose(prices, trial, settings, rule).missing:
            return hundredth / 100
    return None


def exhausted_line(choice: GraphSelection, holds: float | None, division: Division) -> str | None:
    """What to set where the budget does not hold the plan; None where it does."""
    if not choice.missing:
        return None
    count, cost = len(choice.missing), sum(p.alone for p in choice.missing)
    verbs = "buckets ({}) get no graph and run" if count > 1 else "bucket ({}) gets no graph and runs"
    lead = f"{count} planned {verbs.format(gib(cost))} compiled"
    if holds is None:
        return f"{lead}; no VLLM_GRAPH_RESERVED_MEM holds them all beside a KV cache for one request."
    return f"{lead}; VLLM_GRAPH_RESERVED_MEM={holds:.2f} holds the plan ({gib(int(division.usable * holds))})."
