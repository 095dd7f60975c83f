"""LoRA adapters as the scheduler sees them: which one each slot of the device holds, and which the ranks are loading.

Ranks copy an adapter to its slot before the launches of a step (``Step.uploads``), in the order of steps, so that
launches in flight still see the slot's earlier contents. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trencadis.core.request import AdapterRef
from trencadis.core.scheduling.sequence import Sequence
from trencadis.core.step import AdapterUpload

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
        self._held: set[int] = set()  # slots that the step which is built encodes images with
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

    def encodes(self, seq: Sequence) -> bool:
        """Implements ``encoder_scheduler.TowerAdapters``."""
        return self.tower_slot(seq) >= 0 or bool(self._free())

    def tower_slot(self, seq: Sequence) -> int:
        """Implements ``encoder_scheduler.TowerAdapters``."""
        adapter = seq.request.adapter
        if adapter is None or not adapter.tower:
            return 0
        return self._find(adapter.digest) or -1

    def hold(self, slot: int) -> None:
        """Implements ``encoder_scheduler.TowerAdapters``."""
        self._held.add(slot)

    def take_uploads(self) -> tuple[AdapterUpload, ...]:
        """Returns the uploads of the step that is built, which ends what ``hold`` began."""
        self._held.clear()
        if not self._uploads:
            return ()
        made, self._uploads = tuple(self._uploads), []
        return made

    def _find(self, digest: str) -> int:
        """Returns the slot of an adapter; 0: it has none."""
        return self.digests.index(digest) if digest in self.digests else 0

    def _free(self) -> int:
        """Returns the slot that an adapter can get: one that was never used, or else the least recent; 0: none."""
        unused = (slot for slot in range(1, self.count + 1) if not self._users[slot] and slot not in self._held)
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
