"""What the ranks of one engine decide together about their graphs, so that all replay a bucket or none does.

Memory is not the same on every rank, and a capture can fail on one of them. Every rank runs the same Steps and the same
pieces of warm-up, and so comes to the same questions in the same order:

    pools       once, before the first capture: the least budget of each pool
    attempt     before a capture: the least free memory, and whether every rank has compiled the bucket
    outcome     after it: the worst outcome, and the dearest cost; where one failed, the others release theirs
    lost        after a release: the most that did not come back
    compiled    after each compilation and validation of warm-up: whether it went well everywhere

No answer of one rank alone decides whether the next question is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trencadis.core.backend import Backend


class Agreement:
    """Least and most over the ranks, on the host; a rank that is alone agrees with itself."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self._backend.comm.world == 1

    def least(self, *values: int) -> tuple[int, ...]:
        """The smallest of each value.

        Whatever was submitted runs first: a collective that still waits on the device of one rank would wait for
        ranks that are here already.
        """
        if self.alone:
            return values
        self._backend.synchronize()
        return self._backend.comm.least(values)

    def most(self, *values: int) -> tuple[int, ...]:
        """The largest of each value."""
        return tuple(-v for v in self.least(*(-v for v in values)))

    def everywhere(self, fine: bool) -> bool:
        """Whether every rank says so."""
        return bool(self.least(int(fine))[0])
