"""Interfaces for communication between ranks of one stage and between stages; ``core.device.backend`` re-exports them.

Torch-free.
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
