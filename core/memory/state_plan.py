"""How many sequences and snapshots the pool of recurrent state holds. Pure; sizes in bytes.

A sequence needs a slot of fixed size in every recurrent layer. If ``--max-num-seqs`` is given, each of that many
sequences gets one; else as many as fit into a share of the memory that is left for them and the KV cache. Snapshots
have a budget of their own (``--state-snapshot-memory``).
"""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.host_memory import gib
from trencadis.core.memory.ledger import DeviceTooSmall

SHARE = 0.5
"""Share of the memory left for states and KV cache that the states of sequences take at most, unless told otherwise."""

MOST_SNAPSHOTS = 4096


@dataclass(frozen=True)
class StatePlan:
    """The slots of recurrent state. ``sequences``: one for each running sequence, and one that waits for its fetch."""

    sequences: int = 0
    snapshots: int = 0
    slot_bytes: int = 0

    @property
    def slots(self) -> int:
        """Slots of the tensors, with the sink of padding; 0: the model has no recurrent layers."""
        return 1 + self.sequences + self.snapshots if self.sequences else 0

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    def notes(self, rows: int) -> list[str]:
        """Returns lines for users; ``rows``: ``--max-num-seqs``."""
        if not self.sequences:
            return []
        kept = f"{self.snapshots} snapshots" if self.snapshots else "no snapshots, so that no prefixes are shared,"
        line = f"recurrent state: {self.sequences - 1} sequences and {kept} of {gib(self.slot_bytes)} each"
        if self.sequences <= rows:
            line += f"; --max-num-seqs {rows} would need {gib((rows + 2) * self.slot_bytes)}"
        return [line]


NO_STATES = StatePlan()


def plan_states(config: EngineConfig, model: ModelConfig, slot: int, rows: int, left: int, cache: int) -> StatePlan:
    """Plans the pool of recurrent state.

    Args:
        slot: bytes of a slot over all recurrent layers of the device; 0: it has none of them.
        rows: most sequences that may run at a time.
        left: bytes left for states and KV cache.
        cache: bytes of the KV cache, of which the snapshots have a share.

    Raises:
        StartupError: the states of ``--max-num-seqs`` sequences do not fit.
        DeviceTooSmall: the state of a single one does not.
    """
    if model.text.recurrent is None:
        return NO_STATES
    if not slot:  # a pipeline stage without such layers: the others decide
        caches = config.state_snapshot_memory and config.enable_prefix_caching and config.enable_chunked_prefill
        return StatePlan(rows + 1, MOST_SNAPSHOTS if caches else 0)
    count = min(rows + 1, int(SHARE * left) // slot - 1) if config.max_num_seqs is None else rows + 1
    fits = left // slot - 1
    if left <= 0:  # what is in use without any state does not fit, which the KV cache's check says
        return StatePlan(2, 0, slot)
    if count < 2 or count > fits:
        need, many = gib((max(count, 2) + 1) * slot), max(count - 1, 1)
        line = f"{model.name}: the recurrent state of {many} sequences needs {need} and {gib(left)} are left"
        if fits < 2:
            raise DeviceTooSmall(f"{line}; not one fits")
        raise StartupError(f"{line}; {fits - 1} fit (--max-num-seqs {fits - 1})")
    return StatePlan(count, _count_snapshots(config, slot, min(cache, left - (count + 1) * slot)), slot)


def _count_snapshots(config: EngineConfig, slot: int, cache: int) -> int:
    """Returns the number of snapshots that ``--state-snapshot-memory`` holds."""
    asked = config.state_snapshot_memory
    if not config.enable_prefix_caching or not config.enable_chunked_prefill:
        return 0
    budget = int(asked) if asked > 1 else int(asked * cache)
    if budget > cache:
        raise StartupError(f"--state-snapshot-memory {int(asked)}: {gib(max(cache, 0))} are left for the KV cache")
    return min(budget // slot, MOST_SNAPSHOTS)
