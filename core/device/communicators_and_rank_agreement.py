"""Interfaces for communication between ranks of one stage and between stages, and agreement of all ranks on values.

``core.device.backend`` re-exports the interfaces. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Comm(Protocol):
    """Collectives of the ranks of one pipeline stage; a world of 1 does nothing."""

    rank: int
    world: int

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """Returns the minimum of each value over the ranks, computed on the host independently of the device's work."""
        ...


class SingleRank:
    """Collectives of a world of one."""

    rank = 0
    world = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)


class Pipe(Protocol):
    """The ``pipe`` of a backend whose ``BackendConfig.stages`` is above 1.

    It links a rank to its counterparts on the neighbouring stages; transfers follow the order of launches.
    """

    def bind(self, stream: Tensor | None, hidden: Tensor | None) -> None:
        """Sets the tensors [rows, hidden] in which rows arrive and from which they are sent; called once, before any
        transfer.

        ``stream`` is None on the first stage, ``hidden`` on the last one.
        """
        ...

    def send(self, hidden: Tensor, count: int) -> None:
        """Sends rows 1 to ``count`` to the next stage; the caller may overwrite them in its next launches."""
        ...

    def receive(self, stream: Tensor, count: int) -> None:
        """Fills rows 1 to ``count`` with those sent by the previous stage, before later launches read them."""
        ...

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """Returns the minimum of each value over all ranks of all stages, computed on the host."""
        ...


class RankBackend(Protocol):
    """Part of ``core.device.backend.Backend`` that an agreement needs; with several stages it also has ``pipe``."""

    @property
    def comm(self) -> Comm: ...

    def synchronize(self) -> None: ...


class RankAgreement:
    """Minimum and maximum over the ranks of an engine, computed on the host; a single rank gets its own values.

    A bucket's graph is replayed on all ranks or on none. Free memory differs between ranks, and a capture may fail on
    one of them only. All ranks run the same Steps and the same units of warm-up, so they reach the same decisions in
    the same order:

        pools       once, before the first capture: the least budget of each pool
        attempt     before a capture: the least free memory, and whether every rank has compiled the bucket
        outcome     after it: the worst outcome and the highest cost; after a failure the other ranks release theirs
        lost        after a release: the most bytes that did not come back
        compiled    after each compilation and validation of warm-up: whether it succeeded on every rank

    Only agreed values determine which comparison comes next. "All ranks" means those of one pipeline stage, because no
    graph spans stages. Over all stages (``over_stages``) the ranks agree on memory, shapes and numbers of blocks, and
    on the end of warm-up.
    """

    def __init__(self, backend: RankBackend) -> None:
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
