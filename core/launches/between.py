"""The interface between pipeline stages; ``core.backend`` offers it too. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Pipe(Protocol):
    """What a backend has as ``pipe`` where ``BackendConfig.stages`` is above 1: links of a rank to its twins on the
    stages beside its own, in the order of launches."""

    def send(self, rows: Tensor) -> None:
        """Hands ``rows`` [n, hidden] to the next stage; the caller may write to them once it has launched more."""
        ...

    def receive(self, rows: Tensor) -> None:
        """Fills ``rows`` [n, hidden] with what the stage before sends, before later launches read them."""
        ...

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """The smallest of each value over all ranks of all stages, compared on the host."""
        ...
