"""The ledger of a device's memory, whose rows sum to its total, and the accounts of graph pools during captures.

Pure; sizes in bytes. The margin takes what rounding leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from trencadis.core.graph_plan_report import LedgerRow
from trencadis.core.host_memory import gib
from trencadis.core.memory.memory_split import DECODE, POOLS, TEXT, VISION, MemoryInUse, MemorySplit, share_of

UNUSED_SHARE = Fraction(2, 100)
"""Fraction of the device that may stay reserved and unused before a line recommends a change."""


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
