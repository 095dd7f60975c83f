"""Where every byte of a device goes. Pure; sizes in bytes. Graph pools follow the Gaudi guide's arithmetic.

    graphs  = usable x reserved     kv = usable - graphs, in whole blocks
    prefill = graphs x prompt       decode = graphs - prefill
    text    = prefill x text        vision = prefill - text        (multimodal models only)

Shares are exact decimals and are rounded down; what rounding leaves goes to the margin, so the rows sum to the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from trencadis.core.buckets import Stage
from trencadis.core.errors import StartupError
from trencadis.core.layout import RESERVED_BLOCKS
from trencadis.core.units import gib

TEXT, VISION, DECODE = "text", "vision", "decode"
POOLS = (TEXT, VISION, DECODE)

UNUSED_SHARE = Fraction(2, 100)
"""Share of the device that may stay reserved and unused before a line says so."""


def pool_of(stage: Stage) -> str:
    """The pool that pays for a stage's graphs; SAMPLE and RESET belong to decoding."""
    if stage is Stage.VISION:
        return VISION
    return DECODE if stage in (Stage.DECODE, Stage.SAMPLE, Stage.RESET) else TEXT


class NoRoom(StartupError):
    """Not even the whole device is enough; ``blocks`` is what its pool would hold."""

    def __init__(self, message: str, blocks: int = 0) -> None:
        super().__init__(message)
        self.blocks = blocks


@dataclass(frozen=True)
class GraphSettings:
    """VLLM_GRAPH_* as values; ``asked`` holds each pool's bytes where they come from measurements instead."""

    reserved: float = 0.1
    prompt: float = 0.3
    text: float = 0.3
    prompt_strategy: str = "min_tokens"
    decode_strategy: str = "max_bs"
    eager: bool = False
    asked: tuple[int, int, int] | None = None

    def strategy(self, pool: str) -> str:
        """Which graphs of a pool come first."""
        return self.decode_strategy if pool == DECODE else self.prompt_strategy


@dataclass(frozen=True)
class Before:
    """Bytes that are spoken for before the KV cache."""

    total: int
    others: int = 0
    weights: int = 0
    arena: int = 0
    state: int = 0
    hidden: int = 0
    inputs: int = 0
    activations: int = 0

    @property
    def free(self) -> int:
        """What is left after profiling."""
        return self.total - self.taken

    @property
    def taken(self) -> int:
        """What is not: other programs, weights, fixed tensors, and the activations of the costliest launch."""
        fixed = self.weights + self.arena + self.state + self.hidden + self.inputs
        return self.others + fixed + self.activations


@dataclass(frozen=True)
class Division:
    """What ``usable`` was divided into; ``blocks`` counts the pool alone."""

    usable: int
    graphs: int
    kv: int
    blocks: int
    text: int
    vision: int
    decode: int

    def pools(self) -> dict[str, int]:
        """Bytes of each graph pool."""
        return {TEXT: self.text, VISION: self.vision, DECODE: self.decode}


def share(amount: int, ratio: float) -> int:
    """``ratio`` of ``amount``, rounded down; the ratio means its decimal digits (0.1 is one tenth)."""
    return int(amount * Fraction(repr(float(ratio))))


def usable(before: Before, utilisation: float, of: str) -> int:
    """What KV cache and graphs may use: a share of the ``free`` memory, or of the ``total`` less what is taken."""
    if of == "total":
        return max(share(before.total, utilisation) - before.taken, 0)
    return max(share(before.free, utilisation), 0)


def divide(
    before: Before,
    utilisation: float,
    of: str,
    settings: GraphSettings,
    block_bytes: int,
    multimodal: bool,
    kv_bytes: int | None = None,
) -> Division:
    """KV cache and graph pools. ``kv_bytes`` fixes the KV cache, as far as it fits."""
    room = usable(before, utilisation, of)
    if settings.eager:
        text = vision = decode = graphs = 0
    elif settings.asked is not None:
        text, vision, decode = _scaled(settings.asked, room)
        graphs = text + vision + decode
    else:
        graphs = share(room, settings.reserved)
        prefill = share(graphs, settings.prompt)
        text = share(prefill, settings.text) if multimodal else prefill
        vision, decode = prefill - text, graphs - prefill
    kv = room - graphs if kv_bytes is None else min(kv_bytes, room - graphs)
    count = kv // block_bytes
    return Division(room, graphs, count * block_bytes, max(count - RESERVED_BLOCKS, 0), text, vision, decode)


def _scaled(asked: tuple[int, int, int], room: int) -> tuple[int, int, int]:
    """Measured needs, cut to half of the room where they are more."""
    total = sum(asked)
    if 2 * total <= room:
        return asked
    text, vision, decode = (a * (room // 2) // total for a in asked)
    return text, vision, decode


@dataclass
class PoolAccounts:
    """What graphs have really cost: budgets of the pools, and bytes charged to them. Mutable; one per rank."""

    budget: dict[str, int]
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POOLS, 0))
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POOLS, 0))
    closed: set[str] = field(default_factory=set)

    def left(self, pool: str) -> int:
        """What a pool can still pay; nothing once it is closed, or overdrawn."""
        if pool in self.closed:
            return 0
        return max(self.budget[pool] - self.spent[pool] - self.lost[pool], 0)

    def charge(self, pool: str, cost: int) -> bool:
        """Books a captured graph; False where it ended above its pool and must be released."""
        self.spent[pool] += cost
        return self.spent[pool] + self.lost[pool] <= self.budget[pool]

    def release(self, pool: str, cost: int, returned: int) -> None:
        """Takes a graph of ``cost`` bytes off the books; what did not come back stays charged as lost, and what comes
        back beyond it had been lost: some devices return the memory of graphs with the last one only."""
        self.spent[pool] -= cost
        self.lost[pool] += max(cost - max(returned, 0), 0)
        late = max(returned - cost, 0)
        for other in (pool, *POOLS):
            found = min(late, self.lost[other])
            self.lost[other] -= found
            late -= found

    def close(self, pool: str) -> None:
        """No more captures from this pool: memory ran out in one."""
        self.closed.add(pool)

    def hand_over(self, pool: str) -> None:
        """Moves what the other pools have left to ``pool``."""
        for other in POOLS:
            if other != pool:
                rest = max(self.budget[other] - self.spent[other] - self.lost[other], 0)
                self.budget[other] -= rest
                self.budget[pool] += rest


@dataclass(frozen=True)
class Ledger:
    """A device's memory, row by row; the rows sum to the device to the byte."""

    before: Before
    division: Division
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POOLS, 0))
    lost: int = 0

    def rows(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes). The margin takes rounding, and what graphs cost above the reserve."""
        b, d = self.before, self.division
        used = sum(self.spent.values()) + self.lost
        listed = (
            ("used by others", b.others),
            ("weights", b.weights),
            ("image arena", b.arena),
            ("sampler state", b.state),
            ("hidden rows", b.hidden),
            ("static inputs", b.inputs),
            ("activations and workspace", b.activations),
            ("KV cache", d.kv),
            ("text graphs", self.spent[TEXT]),
            ("vision graphs", self.spent[VISION]),
            ("decode graphs", self.spent[DECODE]),
            ("graphs not returned", self.lost),
            ("graph reserve unused", max(d.graphs - used, 0)),
        )
        return (*listed, ("margin", b.total - sum(count for _, count in listed)))

    @property
    def unused(self) -> int:
        """Bytes that stay reserved for graphs that are not there."""
        return dict(self.rows())["graph reserve unused"]


def closed_books(before: Before, division: Division, books: PoolAccounts) -> Ledger:
    """The ledger after capture."""
    return Ledger(before, division, dict(books.spent), sum(books.lost.values()))


# Advice: lines with values


def check_room(
    before: Before,
    utilisation: float,
    of: str,
    settings: GraphSettings,
    block_bytes: int,
    multimodal: bool,
    needed: int,
    max_model_len: int,
) -> Division:
    """The division, if its pool holds ``needed`` blocks, which are one request of ``max_model_len``.

    Raises:
        StartupError: it does not; the line names a utilisation with which it does.
        NoRoom: no utilisation helps.
    """
    found = divide(before, utilisation, of, settings, block_bytes, multimodal)
    if found.blocks >= needed:
        return found
    fits = utilisation_that_fits(before, of, settings, block_bytes, multimodal, needed)
    what = f"one request of --max-model-len {max_model_len} needs {gib((needed + RESERVED_BLOCKS) * block_bytes)} of KV"
    if fits is not None:
        raise StartupError(
            f"{what} and --gpu-memory-utilization {utilisation:g} leaves {gib(found.kv)}; "
            f"--gpu-memory-utilization {fits:.2f} fits."
        )
    most = divide(before, 1.0, of, settings, block_bytes, multimodal)
    if before.free <= 0:
        raise NoRoom(f"the device has {gib(before.total)} and {gib(before.taken)} are needed before the KV cache")
    raise NoRoom(f"{what} and at most {gib(most.kv)} can be had", most.blocks)


def utilisation_that_fits(
    before: Before, of: str, settings: GraphSettings, block_bytes: int, multimodal: bool, needed: int
) -> float | None:
    """The smallest hundredth with which the pool holds ``needed`` blocks; None: not even all of the device does."""
    for hundredth in range(1, 101):
        found = divide(before, hundredth / 100, of, settings, block_bytes, multimodal)
        if found.blocks >= needed:
            return hundredth / 100
    return None


def unused_line(ledger: Ledger, block_bytes: int, reserved: float, holds: float) -> str | None:
    """Which VLLM_GRAPH_RESERVED_MEM would turn an unused reserve into KV blocks; None where little is unused.

    ``holds`` is the smallest share with which the same graphs are captured.
    """
    d = ledger.division
    if ledger.unused <= ledger.before.total * UNUSED_SHARE or holds >= reserved:
        return None
    blocks = (d.usable - share(d.usable, holds)) // block_bytes - (d.usable - share(d.usable, reserved)) // block_bytes
    if blocks < 1:
        return None
    return (
        f"{gib(ledger.unused)} are reserved for graphs and unused: VLLM_GRAPH_RESERVED_MEM={holds:.2f} "
        f"would turn them into {blocks} KV blocks (--graph-memory auto does so at the next start)."
    )
