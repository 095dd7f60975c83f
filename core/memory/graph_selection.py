"""Selects the graphs that fit a budget. Pure; sizes in bytes.

The budget decides what is captured, not what is compiled: a bucket without a graph runs compiled at its padded shape.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trencadis.core.buckets import LORA, Bucket, Stage, padded_tokens
from trencadis.core.host_memory import gib
from trencadis.core.memory.memory_division import POOLS, GraphSettings, MemorySplit, pool_of, share_of

SPARE = 256 << 20
"""Bytes that must stay free during a capture, in addition to its predicted cost."""

STRATEGIES = ("min_tokens", "max_bs")


@dataclass(frozen=True)
class GraphPrice:
    """The predicted cost of a graph: ``own`` (outputs, code) and the workspace of its capture."""

    bucket: Bucket
    own: int
    workspace: int = 0
    gain: float = 1.0

    @property
    def alone(self) -> int:
        """Cost of the graph if there are no others."""
        return self.own + self.workspace


def may_start(predicted: int, free: int) -> bool:
    """Returns True if 1.5 x the predicted bytes and 256 MiB are free, which every capture requires."""
    return 2 * free >= 3 * predicted + 2 * SPARE


def can_pay(predicted: int, left: int) -> bool:
    """Returns True if a pool has enough bytes for a capture: 1.1 x the predicted ones."""
    return 10 * left >= 11 * predicted


def rows_of(bucket: Bucket) -> int:
    """Returns the rows of a launch, by which ``max_bs`` sorts."""
    if bucket.stage is Stage.PREFILL:
        return bucket.dims[1]
    return 1 if bucket.stage in (Stage.CONTEXT, Stage.VISION) else bucket.dims[0]


def order_prices(prices: Iterable[GraphPrice], strategy: str) -> list[GraphPrice]:
    """Returns the order of capture: ``min_tokens`` smallest launches first.

    ``max_bs`` most rows first, then smallest. Graphs of launches with adapters come last: where a pool's
    memory is short, the base model has those graphs of it that it has without adapters.
    """

    def key(p: GraphPrice) -> tuple[object, ...]:
        b = p.bucket
        small = (padded_tokens(b), b.dims[1:], b.stage, b.dims, b.variant)
        ordered = small if strategy == "min_tokens" else (-rows_of(b), *small)
        return (b.variant == LORA, *ordered)

    return sorted(prices, key=key)


def set_cost(prices: Iterable[GraphPrice], rule: str) -> int:
    """Returns the cost of a set of graphs: workspaces are summed (``sum``), or each stage shares one (``max``)."""
    own, works = 0, dict[Stage, list[int]]()
    for p in prices:
        own += p.own
        works.setdefault(p.bucket.stage, []).append(p.workspace)
    return own + sum(max(w) if rule == "max" else sum(w) for w in works.values())


def request_pools(settings: GraphSettings, prices: Sequence[GraphPrice], rule: str) -> GraphSettings:
    """Returns the settings with text, vision and decode pools that hold these graphs, each with a tenth more."""
    by_pool = ([p for p in prices if pool_of(p.bucket.stage) == pool] for pool in POOLS)
    text, vision, decode = (-(-11 * set_cost(found, rule) // 10) for found in by_pool)
    return dataclasses.replace(settings, requested=(text, vision, decode))


def held_workspace(prices: Iterable[GraphPrice]) -> dict[Stage, int]:
    """Returns the workspace that the graphs of each stage share."""
    found = dict[Stage, int]()
    for p in prices:
        found[p.bucket.stage] = max(p.workspace, found.get(p.bucket.stage, 0))
    return found


def affordable_graphs(
    prices: Iterable[GraphPrice], budget: int, strategy: str, rule: str, held: Sequence[GraphPrice] = ()
) -> list[GraphPrice]:
    """Returns the graphs that fit ``budget``, in order; one that is too large is skipped, later ones may still fit.

    ``held`` are the pool's graphs so far; under the ``max`` rule new graphs share their workspace.
    """
    taken: list[GraphPrice] = []
    work = held_workspace(held) if rule == "max" else {}
    for price in order_prices(prices, strategy):
        extra = max(price.workspace - work.get(price.bucket.stage, 0), 0)
        if can_pay(price.own + extra, budget):
            budget -= price.own + extra
            if rule == "max":
                work[price.bucket.stage] = max(work.get(price.bucket.stage, 0), price.workspace)
            taken.append(price)
    return taken


@dataclass(frozen=True)
class GraphSelection:
    """The graphs to capture and their cost, by pool; ``missing`` are those of buckets that stay compiled."""

    taken: Mapping[str, tuple[GraphPrice, ...]]
    spent: Mapping[str, int]
    missing: tuple[GraphPrice, ...] = field(default=())


def select_graphs(
    prices: Iterable[GraphPrice], memory_split: MemorySplit, settings: GraphSettings, rule: str
) -> GraphSelection:
    """Selects each pool's graphs; unspent bytes then go to the pools with the most uncaptured gain per byte."""
    by_pool: dict[str, list[GraphPrice]] = {pool: [] for pool in POOLS}
    for price in prices:
        by_pool[pool_of(price.bucket.stage)].append(price)
    budgets = memory_split.pools()
    taken: dict[str, list[GraphPrice]] = {}
    for pool in POOLS:
        taken[pool] = affordable_graphs(by_pool[pool], budgets[pool], settings.strategy(pool), rule)
    spent = {pool: set_cost(taken[pool], rule) for pool in POOLS}
    rest = sum(budgets.values()) - sum(spent.values())
    for pool in by_gain(by_pool, taken):
        more = affordable_graphs(missing(by_pool[pool], taken[pool]), rest, settings.strategy(pool), rule, taken[pool])
        taken[pool] += more
        now = set_cost(taken[pool], rule)
        rest -= now - spent[pool]
        spent[pool] = now
    left = tuple(p for pool in POOLS for p in missing(by_pool[pool], taken[pool]))
    return GraphSelection({pool: tuple(t) for pool, t in taken.items()}, spent, left)


def missing(every: Sequence[GraphPrice], taken: Sequence[GraphPrice]) -> list[GraphPrice]:
    """Returns the prices of the buckets that are not in ``taken``."""
    got = {p.bucket for p in taken}
    return [p for p in every if p.bucket not in got]


def by_gain(every: Mapping[str, Sequence[GraphPrice]], taken: Mapping[str, Sequence[GraphPrice]]) -> list[str]:
    """Returns the pools that lack graphs, sorted by uncaptured gain per byte, highest first."""
    rates = {}
    for pool in every:
        open_ = missing(every[pool], taken[pool])
        if open_:
            rates[pool] = sum(p.gain for p in open_) / max(sum(p.alone for p in open_), 1)
    return sorted(rates, key=lambda pool: (-rates[pool], pool))


def predict_bytes(bucket: Bucket, formula: Callable[[Bucket], int], measured: Mapping[Bucket, int]) -> int:
    """Returns the bytes of a graph: measured, or estimated from a measured neighbour of its stage; else by ``formula``.

    The neighbour is the smallest measured bucket that is not smaller than this one. Its cost is scaled by the formula's
    ratio, but never up: buckets are captured in any order, so the only neighbour may be far larger. Above all measured
    buckets, the cost of the largest is scaled by tokens. A neighbour of another variant may have fewer layers: if there
    is none of this variant, the formula's ratio may also scale up.
    """
    if bucket in measured:
        return measured[bucket]
    size = padded_tokens(bucket)
    known = sorted((padded_tokens(b), cost, b) for b, cost in measured.items() if b.stage is bucket.stage)
    if not known:
        return formula(bucket)
    alike = [one for one in known if one[2].variant == bucket.variant]
    tokens, cost, neighbour = next((one for one in alike or known if one[0] >= size), (alike or known)[-1])
    scaled = -(-cost * formula(bucket) // max(formula(neighbour), 1))
    if not alike:
        return scaled
    return min(cost, scaled) if tokens >= size else -(-cost * size // tokens)


def prices_by(
    measured: Mapping[Bucket, int], formulas: Sequence[GraphPrice], alone: Callable[[Bucket], int], rule: str
) -> list[GraphPrice]:
    """Returns measured prices; for other graphs, ``formulas`` scaled by the measured / predicted cost of their stage.

    If graphs share memory (``max``), formulas are not scaled, because a measured cost may or may not include the
    workspace, depending on the order of captures. ``alone``: a graph's bytes by formula.
    """
    paid, said = Counter[Stage](), Counter[Stage]()
    for bucket, cost in measured.items():
        paid[bucket.stage] += cost
        said[bucket.stage] += alone(bucket)

    def price(p: GraphPrice) -> GraphPrice:
        stage = p.bucket.stage
        if p.bucket in measured:
            return GraphPrice(p.bucket, measured[p.bucket])
        return p if rule == "max" or not said[stage] else GraphPrice(p.bucket, -(-p.alone * paid[stage] // said[stage]))

    return [price(p) for p in formulas]


def reserve_that_holds(
    prices: Sequence[GraphPrice],
    memory_split: MemorySplit,
    settings: GraphSettings,
    rule: str,
    multimodal: bool,
    least_kv: int = 0,
) -> float | None:
    """Returns the smallest VLLM_GRAPH_RESERVED_MEM, in hundredths, with which every graph is captured.

    None: every such value leaves less than ``least_kv`` bytes to the KV cache.
    """
    for hundredth in range(1, 100):
        graphs = share_of(memory_split.usable, hundredth / 100)
        if memory_split.usable - graphs < least_kv:
            return None
        if graphs < set_cost(prices, rule):
            continue
        prefill = share_of(graphs, settings.prompt)
        text = share_of(prefill, settings.text) if multimodal else prefill
        trial = MemorySplit(memory_split.usable, graphs, 0, 0, text, prefill - text, graphs - prefill)
        if not select_graphs(prices, trial, settings, rule).missing:
            return hundredth / 100
    return None


def exhausted_line(selection: GraphSelection, holds: float | None, memory_split: MemorySplit) -> str | None:
    """Returns a line with the setting with which the budget suffices for the plan; None if it does already."""
    if not selection.missing:
        return None
    count, cost = len(selection.missing), sum(p.alone for p in selection.missing)
    verbs = "buckets ({}) get no graph and run" if count > 1 else "bucket ({}) gets no graph and runs"
    lead = f"{count} planned {verbs.format(gib(cost))} compiled"
    if holds is None:
        return f"{lead}; no VLLM_GRAPH_RESERVED_MEM holds them all beside a KV cache for one request."
    return f"{lead}; VLLM_GRAPH_RESERVED_MEM={holds:.2f} holds the plan ({gib(int(memory_split.usable * holds))})."
