"""Agreement of the ranks of one engine on their graphs, so that a bucket is replayed on all of them or on none.

Free memory differs between ranks, and a capture may fail on one of them only. All ranks run the same Steps and the same
units of warm-up, so they reach the same decisions in the same order:

    pools       once, before the first capture: the least budget of each pool
    attempt     before a capture: the least free memory, and whether every rank has compiled the bucket
    outcome     after it: the worst outcome and the highest cost; if it failed on one rank, the others release theirs
    lost        after a release: the most bytes that did not come back
    compiled    after each compilation and validation of warm-up: whether it succeeded on every rank

Only agreed values determine which comparison comes next. "All ranks" means those of one pipeline stage, because no
graph spans stages. Over all stages (``over_stages``) the ranks agree on memory, shapes and numbers of blocks, and on
the end of warm-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trencadis.core.device.backend import Backend, Pipe


class RankAgreement:
    """Minimum and maximum over the ranks, computed on the host; a single rank gets its own values."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def alone(self) -> bool:
        """True if this is the only rank."""
        return self._backend.comm.world == 1

    def least(self, *values: int) -> tuple[int, ...]:
        """Returns the minimum of each value over the ranks.

        The device finishes its submitted work first: a collective still pending on one rank would wait for ranks that
        are already blocked here.
        """
        if self.alone:
            return values
        self._backend.synchronize()
        return self._backend.comm.least(values)

    def over_stages(self, *values: int) -> tuple[int, ...]:
        """Returns the minimum of each value over the ranks of all pipeline stages."""
        pipe: Pipe | None = getattr(self._backend, "pipe", None)
        if pipe is None:
            return self.least(*values)
        self._backend.synchronize()
        return pipe.least(values)

    def most(self, *values: int) -> tuple[int, ...]:
        """Returns the maximum of each value over the ranks."""
        return tuple(-v for v in self.least(*(-v for v in values)))

    def is_true_everywhere(self, fine: bool) -> bool:
        """Returns True if ``fine`` is true on every rank."""
        return bool(self.least(int(fine))[0])
