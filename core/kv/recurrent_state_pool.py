"""Slots of recurrent state: those of running sequences, and snapshots that later requests begin with. Pure Python.

A slot is written by the sequence that holds it. A snapshot costs no copy: the slot that holds the state at its token is
given to the pool, and the sequence goes on in another slot, whose first launch reads the old one. Launches run in the
order of their steps, so that a slot may be written again by any step after the last one that reads it.

| a slot is | held by | readers | has a key |
|---|---|---|---|
| in use | a sequence | 0 | no |
| pending: its launch is in flight | the pool | >= 0 | no |
| a snapshot | the pool | >= 0 | yes |
| free | nobody | 0 | no |
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trencadis.core.kv.block_pool import HostBlockPool


class PendingSnapshot(NamedTuple):
    """A snapshot whose launch has not completed: the key of the block chain that it ends, and its slot."""

    key: bytes
    slot: int


class StatePool:
    """Slots [1, 1 + size); slot 0 is the sink of padding and stands for a state of zeros.

    Args:
        size: slots of sequences and snapshots together.
        snapshots: most snapshots at a time. For others, and for sequences, those make room first that a later one of
            the same prompt follows and that no request has begun with; then the least recently used one.
        host: host memory for the states of preempted sequences.
    """

    def __init__(self, size: int, snapshots: int = 0, host: HostBlockPool | None = None) -> None:
        self.size, self.most, self.host = size, snapshots, host
        self.hits = self.misses = self.evictions = 0
        self._free = list(range(size, 0, -1))
        self._readers: dict[int, int] = {}
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._pending: dict[int, bytes] = {}
        self._shared: set[bytes] = set()  # keys of snapshots that requests have begun with
        self._passed: dict[bytes, None] = {}  # of those that none has, and that a later one of the same prompt follows
        self._orphans: set[int] = set()  # dropped by the pool, and still read by a sequence
        self._resting: list[int] = []  # read by the step that is being built, so that only later ones may write them
        self._read_now: set[int] = set()

    @property
    def snapshots(self) -> int:
        """Number of snapshots that requests may begin with."""
        return len(self._keys)

    @property
    def free(self) -> int:
        """Number of slots that sequences could take now."""
        return len(self._free) + sum(map(self._is_idle, self._keys.values()))

    def begin_step(self) -> None:
        """Allows the slots that earlier steps read for the last time to be written."""
        self._free += self._resting
        self._resting = []
        self._read_now.clear()

    def take(self) -> int | None:
        """Takes a slot for a sequence; a snapshot makes room if necessary. Returns None if there is none."""
        if not self._free and not self._evict():
            return None
        return self._free.pop() if self._free else None

    def drop(self, slot: int) -> None:
        """Returns the slot of a sequence, none of whose launches is in flight."""
        self._free.append(slot)

    # Snapshots

    def exchange(self, slot: int, key: bytes, before: bytes = b"") -> tuple[int, PendingSnapshot] | None:
        """Makes the state that the next launch leaves in ``slot`` a snapshot.

        ``before``: key of the snapshot of the same prompt that the new one follows, which is worth less from now on.

        Returns the slot in which its sequence goes on, which reads the snapshot once (``release``), and the pending
        snapshot; None if there is no room, or if there is such a snapshot.
        """
        if not self.most or key in self._keys:
            return None
        if before not in self._shared and (before in self._keys or before in self._pending.values()):
            self._passed[before] = None
        while len(self._keys) + len(self._pending) >= self.most:
            if not self._thin(bool(self._free)) and not self._evict():
                return None
        if not self._free:
            return None
        self._pending[slot] = key
        self._readers[slot] = self._readers.get(slot, 0) + 1
        return self._free.pop(), PendingSnapshot(key, slot)

    def publish(self, pending: Iterable[PendingSnapshot]) -> None:
        """Offers snapshots whose launch has completed, and that have not been dropped meanwhile."""
        for key, slot in pending:
            if self._pending.get(slot) != key:
                continue
            del self._pending[slot]
            if key in self._keys:
                self._forget_slot(slot)
                continue
            self._keys[key] = slot

    def longest(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the blocks with these keys, from the first on, end with a snapshot; 0: none."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._keys:
                return count
        return 0

    def claim(self, key: bytes) -> int:
        """Returns the slot of a snapshot, which a sequence will read once (``release``)."""
        slot = self._keys[key]
        self._keys.move_to_end(key)
        self._passed.pop(key, None)
        self._shared.add(key)
        self._readers[slot] = self._readers.get(slot, 0) + 1
        self.hits += 1
        return slot

    def release(self, slot: int, read: bool) -> None:
        """Ends a sequence's claim of a snapshot; ``read``: the step that is being built reads it."""
        left = self._readers.pop(slot) - 1
        if left:
            self._readers[slot] = left
        elif slot in self._orphans:
            self._orphans.discard(slot)
            (self._resting if read else self._free).append(slot)
        if read:
            self._read_now.add(slot)

    def forget(self) -> None:
        """Drops all snapshots, as the prefix cache is emptied."""
        self._passed.clear()
        self._shared.clear()
        while self._keys:
            self._forget_slot(self._keys.popitem()[1])
        if self.host is not None:
            self.host.forget()

    def _evict(self) -> bool:
        """Frees the slot of a snapshot that no sequence is about to read."""
        if self._thin(later=False):
            return True
        key = next((key for key, slot in self._keys.items() if self._is_idle(slot)), None)
        if key is None:
            return False
        self._forget_slot(self._keys.pop(key))
        self._shared.discard(key)
        self.evictions += 1
        return True

    def _thin(self, later: bool) -> bool:
        """Drops the oldest snapshot that a later one of its prompt follows and that no request has begun with.

        ``later``: its slot may become free with a later step only, and its launch may be in flight.
        """
        held = {key: slot for slot, key in self._pending.items()} if later else {}
        for key in self._passed:
            slot = self._keys.get(key) or held.get(key, 0)
            if slot and not self._readers.get(slot) and (later or self._is_idle(slot)):
                self._keys.pop(key, None)
                self._pending.pop(slot, None)
                del self._passed[key]
                self._forget_slot(slot)
                self.evictions += 1
                return True
        return False

    def _is_idle(self, slot: int) -> bool:
        """Returns True if no launch of the step that is being built, or of a later one, reads a snapshot."""
        return not self._readers.get(slot) and slot not in self._read_now

    def _forget_slot(self, slot: int) -> None:
        if self._readers.get(slot):
            self._orphans.add(slot)
        else:
            (self._resting if slot in self._read_now else self._free).append(slot)

    def check(self, held: Sequence[int], sources: Iterable[int]) -> None:
        """Asserts that every slot is in one place, against the slots that sequences hold and those they will read."""
        readers: dict[int, int] = {}
        for slot in sources:
            readers[slot] = readers.get(slot, 0) + 1
        assert readers == self._readers, "claims of snapshots differ from what sequences will read"
        if self.host is not None:
            self.host.check()
        slots = [*held, *self._free, *self._resting, *self._keys.values(), *self._pending, *self._orphans]
        assert sorted(slots) == list(range(1, self.size + 1)), "a slot of recurrent state is lost"
