"""Divides a device's memory, exact to the byte. Pure; sizes in bytes. Graph pools follow the Gaudi guide's arithmetic.

    graphs  = usable x reserved     kv = usable - graphs, in whole blocks
    prefill = graphs x prompt       decode = graphs - prefill
    text    = prefill x text        vision = prefill - text        (multimodal models only)

Shares are exact decimals and are rounded down; the margin takes the rest, so that the rows sum to the device's total.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from trencadis.core.buckets import Stage
from trencadis.core.errors import StartupError
from trencadis.core.graph_and_bucket_learning_report import LedgerRow
from trencadis.core.host_memory import gib
from trencadis.core.kv_cache_format import RESERVED_BLOCKS

TEXT, VISION, DECODE = "text", "vision", "decode"
POOLS = (TEXT, VISION, DECODE)

UNUSED_SHARE = Fraction(2, 100)
"""Fraction of the device that may stay reserved and unused before a line recommends a change."""


def pool_of(stage: Stage) -> str:
    """Returns the pool that a stage's graphs are charged to; SAMPLE, RESET and POOL use the decode pool."""
    if stage is Stage.VISION:
        return VISION
    return DECODE if stage in (Stage.DECODE, Stage.VERIFY, Stage.SAMPLE, Stage.RESET, Stage.POOL) else TEXT


class DeviceTooSmall(StartupError):
    """Raised if the whole device is too small.

    ``blocks``: KV blocks that it would hold. ``missing``: bytes; 0 where they are not known.
    """

    def __init__(self, message: str, blocks: int = 0, missing: int = 0) -> None:
        super().__init__(message)
        self.blocks, self.missing = blocks, missing


@dataclass(frozen=True)
class GraphSettings:
    """The VLLM_GRAPH_* settings.

    ``requested``: bytes of each pool (POOLS) from measurements, instead of the shares.
    """

    reserved: float = 0.1
    prompt: float = 0.3
    text: float = 0.3
    prompt_strategy: str = "min_tokens"
    decode_strategy: str = "max_bs"
    eager: bool = False
    requested: tuple[int, int, int] | None = None

    def strategy(self, pool: str) -> str:
        """Returns the order in which a pool's graphs are captured."""
        return self.decode_strategy if pool == DECODE else self.prompt_strategy


@dataclass(frozen=True)
class MemoryInUse:
    """Bytes that are in use before the KV cache is allocated.

    ``draft_weights``, ``draft_kv``: those of a model that drafts; its KV has as many blocks as the KV cache.
    """

    total: int
    others: int = 0
    weights: int = 0
    arena: int = 0
    state: int = 0
    hidden: int = 0
    inputs: int = 0
    activations: int = 0
    copies: int = 0
    recurrent: int = 0
    adapters: int = 0
    draft_weights: int = 0
    draft_kv: int = 0

    @property
    def free(self) -> int:
        """Bytes left after profiling."""
        return self.total - self.taken

    @property
    def taken(self) -> int:
        """Bytes of other programs, weights, fixed tensors, and the activations of the costliest launch."""
        fixed = self.weights + self.arena + self.state + self.hidden + self.inputs + self.copies
        fixed += self.recurrent + self.adapters
        return self.others + fixed + self.activations + self.draft_weights + self.draft_kv


@dataclass(frozen=True)
class MemorySplit:
    """The division of ``usable`` bytes into KV cache and graph pools; ``blocks`` excludes the reserved ones.

    ``draft``: the bytes of ``kv`` that hold the keys of a draft model, on devices with planned shapes.
    """

    usable: int
    graphs: int
    kv: int
    blocks: int
    text: int
    vision: int
    decode: int
    draft: int = 0

    def pools(self) -> dict[str, int]:
        """Returns the bytes of each graph pool."""
        return {TEXT: self.text, VISION: self.vision, DECODE: self.decode}


def share_of(amount: int, ratio: float) -> int:
    """Returns ``ratio`` of ``amount``, rounded down; the ratio is treated as the exact decimal that it prints as."""
    return int(amount * Fraction(repr(float(ratio))))


def usable_bytes(in_use: MemoryInUse, utilisation: float, of: str) -> int:
    """Returns the bytes for KV cache and graphs: a share of ``free`` memory, or a share of ``total`` minus those in
    use.
    """
    if of == "total":
        return max(share_of(in_use.total, utilisation) - in_use.taken, 0)
    return max(share_of(in_use.free, utilisation), 0)


def divide_memory(
    in_use: MemoryInUse,
    utilisation: float,
    of: str,
    settings: GraphSettings,
    block_bytes: int,
    multimodal: bool,
    kv_bytes: int | None = None,
) -> MemorySplit:
    """Divides the usable bytes into KV cache and graph pools; ``kv_bytes`` fixes the KV cache as far as it fits."""
    available = usable_bytes(in_use, utilisation, of)
    if settings.eager:
        text = vision = decode = graphs = 0
    elif settings.requested is not None:
        text, vision, decode = _scale_requested(settings.requested, available)
        graphs = text + vision + decode
    else:
        graphs = share_of(available, settings.reserved)
        prefill = share_of(graphs, settings.prompt)
        text = share_of(prefill, settings.text) if multimodal else prefill
        vision, decode = prefill - text, graphs - prefill
    kv = available - graphs if kv_bytes is None else min(kv_bytes, available - graphs)
    count = kv // block_bytes
    return MemorySplit(available, graphs, count * block_bytes, max(count - RESERVED_BLOCKS, 0), text, vision, decode)


class _PoolBytes(NamedTuple):
    """Bytes of each graph pool (POOLS)."""

    text: int
    vision: int
    decode: int


def _scale_requested(asked: tuple[int, int, int], available: int) -> _PoolBytes:
    """Returns measured needs, scaled down so that together they take at most half of the available bytes."""
    total = sum(asked)
    if 2 * total <= available:
        return _PoolBytes(*asked)
    return _PoolBytes(*(a * (available // 2) // total for a in asked))


@dataclass
class PoolAccounts:
    """Budget of each graph pool, and the bytes that captured graphs actually took. Mutable; one per rank."""

    budget: dict[str, int]
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POOLS, 0))
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POOLS, 0))
    closed: set[str] = field(default_factory=set)

    def remaining(self, pool: str) -> int:
        """Returns the bytes left in a pool; 0 once it is closed or overdrawn."""
        if pool in self.closed:
            return 0
        return max(self.budget[pool] - self.spent[pool] - self.lost[pool], 0)

    def charge(self, pool: str, cost: int) -> bool:
        """Charges a captured graph; returns False if the pool is now overdrawn and the graph must be released."""
        self.spent[pool] += cost
        return self.spent[pool] + self.lost[pool] <= self.budget[pool]

    def release(self, pool: str, cost: int, returned: int) -> None:
        """Refunds a released graph of ``cost`` bytes, of which ``returned`` were freed; the rest is charged as lost.

        More bytes may be freed than it cost: some devices free the memory of several graphs with the last of them, and
        then earlier losses are refunded.
        """
        self.spent[pool] -= cost
        self.lost[pool] += max(cost - max(returned, 0), 0)
        late = max(returned - cost, 0)
        for other in (pool, *POOLS):
            found = min(late, self.lost[other])
            self.lost[other] -= found
            late -= found

    def close(self, pool: str) -> None:
        """Stops captures from this pool, after one of them ran out of memory."""
        self.closed.add(pool)

    def hand_over(self, pool: str) -> None:
        """Moves the unspent budget of the other pools to ``pool``."""
        for other in POOLS:
            if other != pool:
                rest = max(self.budget[other] - self.spent[other] - self.lost[other], 0)
                self.budget[other] -= rest
                self.budget[pool] += rest


@dataclass(frozen=True)
class Ledger:
    """A device's memory by rows, which sum to its total."""

    memory_in_use: MemoryInUse
    memory_split: MemorySplit
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POOLS, 0))
    lost: int = 0

    def rows(self) -> tuple[LedgerRow, ...]:
        """Returns all rows. The margin takes rounding, and the excess of graphs over the reserve."""
        b, d = self.memory_in_use, self.memory_split
        used = sum(self.spent.values()) + self.lost
        named = (
            ("used by others", b.others),
            ("weights", b.weights),
            *([("adapters", b.adapters)] if b.adapters else []),
            *([("draft weights", b.draft_weights), ("draft KV", b.draft_kv + d.draft)] if b.draft_weights else []),
            ("image arena", b.arena),
            ("sampler state", b.state),
            ("hidden rows", b.hidden),
            ("static inputs", b.inputs),
            *([("copies of host memory", b.copies)] if b.copies else []),
            *([("recurrent state", b.recurrent)] if b.recurrent else []),
            ("activations and workspace", b.activations),
            ("KV cache", d.kv - d.draft),
            ("text graphs", self.spent[TEXT]),
            ("vision graphs", self.spent[VISION]),
            ("decode graphs", self.spent[DECODE]),
            ("graphs not returned", self.lost),
            ("graph reserve unused", max(d.graphs - used, 0)),
        )
        rows = tuple(LedgerRow(*row) for row in named)
        return (*rows, LedgerRow("margin", b.total - sum(row.bytes for row in rows)))

    @property
    def unused(self) -> int:
        """Bytes that are reserved for graphs but not used."""
        return dict(self.rows())["graph reserve unused"]


def final_ledger(in_use: MemoryInUse, memory_split: MemorySplit, accounts: PoolAccounts) -> Ledger:
    """Returns the ledger after graphs have been captured."""
    return Ledger(in_use, memory_split, dict(accounts.spent), sum(accounts.lost.values()))


# Advice: lines that recommend a value of a setting


def check_capacity(
    in_use: MemoryInUse,
    utilisation: float,
    of: str,
    settings: GraphSettings,
    block_bytes: int,
    multimodal: bool,
    needed: int,
    max_model_len: int,
) -> MemorySplit:
    """Divides the memory and checks that it holds ``needed`` KV blocks: those of one request of ``max_model_len``.

    Raises:
        StartupError: it holds fewer; the message names a sufficient utilisation.
        DeviceTooSmall: no utilisation is enough.
    """
    found = divide_memory(in_use, utilisation, of, settings, block_bytes, multimodal)
    if found.blocks >= needed:
        return found
    fits = utilisation_that_fits(in_use, of, settings, block_bytes, multimodal, needed)
    need = (needed + RESERVED_BLOCKS) * block_bytes
    what = f"one request of --max-model-len {max_model_len} needs {gib(need)} of KV"
    if fits is not None:
        raise StartupError(
            f"{what} and --gpu-memory-utilization {utilisation:g} leaves {gib(found.kv)}; "
            f"--gpu-memory-utilization {fits:.2f} fits."
        )
    most = divide_memory(in_use, 1.0, of, settings, block_bytes, multimodal)
    if in_use.free <= 0:
        raise DeviceTooSmall(
            f"the device has {gib(in_use.total)} and {gib(in_use.taken)} are needed before the KV cache",
            missing=need - in_use.free,
        )
    raise DeviceTooSmall(f"{what} and at most {gib(most.kv)} can be had", most.blocks, need - most.kv)


def utilisation_that_fits(
    in_use: MemoryInUse, of: str, settings: GraphSettings, block_bytes: int, multimodal: bool, needed: int
) -> float | None:
    """Returns the smallest utilisation, in hundredths, that yields ``needed`` KV blocks; None: not even 1.0 does."""
    for hundredth in range(1, 101):
        found = divide_memory(in_use, hundredth / 100, of, settings, block_bytes, multimodal)
        if found.blocks >= needed:
            return hundredth / 100
    return None


def unused_line(ledger: Ledger, block_bytes: int, reserved: float, holds: float) -> str | None:
    """Returns a line with the VLLM_GRAPH_RESERVED_MEM that turns an unused reserve into KV blocks.

    Returns None if little is unused.

    ``holds`` is the smallest share with which the same graphs are captured.
    """
    d = ledger.memory_split
    if ledger.unused <= ledger.memory_in_use.total * UNUSED_SHARE or holds >= reserved:
        return None
    blocks = (d.usable - share_of(d.usable, holds)) // block_bytes - (
        d.usable - share_of(d.usable, reserved)
    ) // block_bytes
    if blocks < 1:
        return None
    return (
        f"{gib(ledger.unused)} are reserved for graphs and unused: VLLM_GRAPH_RESERVED_MEM={holds:.2f} "
        f"would turn them into {blocks} KV blocks (--graph-memory auto does so at the next start)."
    )
