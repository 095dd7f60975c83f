"""What a sequence finds when it starts: prefix cache hits, and the slot of its adapter. Torch-free.

Hits are blocks on the device, and blocks copied back from host memory. Of adapters it is known which each slot of the
device holds, and which the ranks hold in host memory. Ranks copy an adapter to its slot before the launches of a step
(``Step.uploads``), in the order of steps, so that launches in flight still see the slot's earlier contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trencadis.core.engine_stats import EngineStats
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.request import AdapterRef
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import NOTHING_FOUND, Filled, PrefixFound, Sequence, SequenceStatus
from trencadis.core.step import AdapterUpload

ON_HOST = 0
"""Stands for a block whose content is in host memory; block 0 is never allocated."""


def cached_blocks(seq: Sequence, limits: SchedulerLimits, pool: BlockPool) -> list[int]:
    """Returns the cached blocks of the start of ``seq``, ON_HOST for those in host memory.

    At least one token is left to compute.
    """
    if not limits.caching or not seq.reads_prefix:
        return []
    limit = (seq.count_known() - 1) // limits.block_size
    keys = seq.block_hashes.extend(seq.tokens, limit * limits.block_size)
    if seq.found.version != pool.version:
        seq.found = PrefixFound(pool.version)
    hits = seq.found.blocks
    while len(hits) < limit and (block := pool.find(keys[len(hits)])) is not None:
        hits.append(block)
    return hits if pool.host is None else _with_host([*hits], keys[:limit], pool)


def _with_host(hits: list[int], keys: list[bytes], pool: BlockPool) -> list[int]:
    """Returns ``hits`` extended by the following blocks on the device or in host memory."""
    for key in keys[len(hits) :]:
        block = pool.find(key)
        if block is None:
            if not pool.on_host(key):
                break
            block = ON_HOST
        hits.append(block)
    return hits


def count_spared_blocks(seq: Sequence, hits: list[int], pool: BlockPool) -> int:
    """Returns by how many free blocks the prefix hits reduce the need of ``seq``."""
    found = seq.found
    new = [block for block in hits[found.counted :] if block != ON_HOST]
    used = found.used + len(new) - pool.idle(new)
    if pool.host is None:  # with host memory the count is not cached
        found.counted, found.used = len(hits), used
    return used


def claim(seq: Sequence, hits: list[int], size: int, pool: BlockPool, totals: EngineStats) -> None:
    """Starts ``seq`` after ``hits``, with a reference to each; ``size``: tokens of a block.

    Hits in host memory get a block, to which they are copied.
    """
    pool.share([block for block in hits if block != ON_HOST])
    absent = [seq.block_hashes.keys[i] for i, block in enumerate(hits) if block == ON_HOST]
    back = iter(pool.restore(absent) if absent else ())
    seq.blocks = [block if block != ON_HOST else next(back) for block in hits]
    seq.computed, seq.published = len(hits) * size, len(hits)
    seq.found = NOTHING_FOUND
    if not seq.outputs:
        seq.stats.cached_tokens = max(seq.stats.cached_tokens, seq.computed)
    totals.host_hits += len(absent) * size
    totals.prefix_hits += seq.computed


def publish(seq: Sequence, pool: BlockPool, size: int) -> None:
    """Adds the full blocks of ``seq`` to the prefix cache; ``size``: tokens of a block."""
    end = min(seq.computed, seq.count_known()) // size
    for i in range(seq.published, end):
        pool.publish(seq.blocks[i], seq.block_hashes.key(seq.tokens, i))
    seq.published = max(seq.published, end)


def publish_filled(filled: Iterable[Filled], limits: SchedulerLimits, pool: BlockPool) -> None:
    """Does the same as ``publish`` for sequences whose last block is full and given, avoiding list look-ups."""
    size = limits.block_size
    for seq, block in filled if limits.caching else ():
        if seq.status is not SequenceStatus.RUNNING:
            continue
        if seq.count_known() == (seq.published + 1) * size:
            pool.publish(block, seq.block_hashes.key(seq.tokens, seq.published))
            seq.published = seq.block_hashes.at  # share one int object, since each costs a memory access
        else:
            publish(seq, pool, size)


if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending

    LoadAdapter = Callable[[AdapterRef, tuple[str, ...]], Pending[str]]

MOST_OVERTAKES = 32
"""Sequences with adapters that may start before one that waits for a slot; then all of them wait for it."""


class AdapterSlots:
    """Slots 1 to ``count``; a slot whose adapter no running sequence uses is given to another, least recent first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.digests: list[str] = [""] * (count + 1)
        """The adapter of each slot; slot 0 is the base model."""
        self._users = [0] * (count + 1)
        self._used_at = [0] * (count + 1)
        self._clock = 0
        self._uploads: list[AdapterUpload] = []
        self._first_denied = 0  # the first sequence of this pass that got no slot
        self._waiting_key = 0  # the first sequence that waits for a slot
        self._overtakes = 0

    def begin_admission(self) -> None:
        """Begins a pass over the waiting sequences, in order."""
        self._first_denied = 0

    def admits(self, seq: Sequence) -> bool:
        """Returns True if ``seq`` may start: it has no adapter, or its adapter has a slot or can get one.

        While a sequence waits for a slot, at most ``MOST_OVERTAKES`` later ones with an adapter start before it, so
        that the slots which they use become free.
        """
        if seq.request.adapter is None:
            return True
        if self._first_denied and self._overtakes >= MOST_OVERTAKES:
            return False
        if self._find(seq.request.adapter.digest) or self._free():
            return True
        self._deny(seq)
        return False

    def _deny(self, seq: Sequence) -> None:
        """Records the first sequence of a pass that waits for a slot."""
        if self._first_denied:
            return
        self._first_denied = seq.key
        if self._waiting_key != seq.key:
            self._waiting_key, self._overtakes = seq.key, 0

    def start(self, seq: Sequence) -> None:
        """Gives a starting sequence the slot of its adapter, which is uploaded if it is not there yet."""
        if seq.request.adapter is None:
            return
        digest = seq.request.adapter.digest
        slot = self._find(digest)
        if not slot:
            slot = self._free()
            assert slot, "a sequence starts without a slot for its adapter"
            self.digests[slot] = digest
            self._uploads.append(AdapterUpload(slot, digest))
        self._overtakes += 1
        self._users[slot] += 1
        seq.adapter_slot = slot

    def stop(self, seq: Sequence) -> None:
        """Releases the slot of a sequence that no longer runs."""
        if seq.adapter_slot:
            self._clock += 1
            self._users[seq.adapter_slot] -= 1
            self._used_at[seq.adapter_slot] = self._clock
            seq.adapter_slot = 0

    def take_uploads(self) -> tuple[AdapterUpload, ...]:
        """Returns the uploads of the step that is built."""
        if not self._uploads:
            return ()
        made, self._uploads = tuple(self._uploads), []
        return made

    def _find(self, digest: str) -> int:
        """Returns the slot of an adapter; 0: it has none."""
        return self.digests.index(digest) if digest in self.digests else 0

    def _free(self) -> int:
        """Returns the slot that an adapter can get: one that was never used, or else the least recent; 0: none."""
        unused = (slot for slot in range(1, self.count + 1) if not self._users[slot])
        return min(unused, key=lambda slot: (self.digests[slot] != "", self._used_at[slot]), default=0)

    def check(self, running: list[Sequence]) -> None:
        """Asserts that each running sequence has the slot of its adapter, and that users are counted."""
        users = [0] * (self.count + 1)
        for seq in running:
            digest = "" if seq.request.adapter is None else seq.request.adapter.digest
            assert self.digests[seq.adapter_slot] == digest, "a sequence runs with another adapter"
            users[seq.adapter_slot] += seq.adapter_slot > 0
        assert users == self._users, "users of a slot are miscounted"


class AdapterLoads:
    """Adapters that the ranks have read or are reading; the least recently used are forgotten.

    Args:
        load: has every rank read an adapter and forget those with the given digests; its result is an error message.
        capacity: adapters in host memory, unless requests use more of them.
        in_use: returns the digests that requests or slots of the device use.
    """

    def __init__(self, load: LoadAdapter, capacity: int, in_use: Callable[[], set[str]]) -> None:
        self._load, self._capacity, self._in_use = load, capacity, in_use
        self._loads: dict[str, Pending[str]] = {}  # by digest, the most recently used last

    def load(self, ref: AdapterRef) -> Pending[str]:
        """Has every rank read an adapter while Steps continue; the result is an error message, or empty."""
        pending = self._loads.pop(ref.digest, None)
        if pending is None or (pending.done() and pending.result()):
            pending = self._load(ref, self._evict())
        self._loads[ref.digest] = pending
        return pending

    def _evict(self) -> tuple[str, ...]:
        """Returns the digests that the ranks forget so that one more adapter fits."""
        surplus = len(self._loads) + 1 - self._capacity
        if surplus <= 0:
            return ()
        used = self._in_use()
        gone = [digest for digest, one in self._loads.items() if digest not in used and one.done()][:surplus]
        for digest in gone:
            del self._loads[digest]
        return tuple(gone)

    @property
    def count(self) -> int:
        """Number of adapters in host memory."""
        return len(self._loads)
