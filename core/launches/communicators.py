"""The interfaces between ranks: of one pipeline stage, and of stages; ``core.backend`` offers them too. Torch-free."""

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
        """The smallest of each value over the ranks, compared on the host, independent of the device's work."""
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
    """What a backend has as ``pipe`` where ``BackendConfig.stages`` is above 1: links of a rank to its twins on the
    stages beside its own, in the order of launches."""

    def bind(self, stream: Tensor | None, hidden: Tensor | None) -> None:
        """Called once, before rows cross: the tensors [rows, hidden] that rows arrive in and leave from.

        None: on the first stage, and on the last one.
        """
        ...

    def send(self, hidden: Tensor, count: int) -> None:
        """Hands rows 1 to ``count`` to the next stage; the caller may write to them once it has launched more."""
        ...

    def receive(self, stream: Tensor, count: int) -> None:
        """Fills rows 1 to ``count`` with what the stage before sends, before later launches read them."""
        ...

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """The smallest of each value over all ranks of all stages, compared on the host."""
        ...
