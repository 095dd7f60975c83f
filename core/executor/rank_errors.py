"""What goes wrong with ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


class RankFailed(RuntimeError):
    """A rank died, raised, or sampled other tokens than rank 0."""


class RankDied(RankFailed):
    """A rank ended without reporting why.

    Args:
        capture: the bucket whose capture it had begun, which may be why; empty: none.
    """

    def __init__(self, message: str, capture: str = "") -> None:
        super().__init__(message)
        self.capture = capture


@dataclass(order=True)
class RankError:
    """A failure of a rank; the one with the lowest weight is reported as the cause. The least is taken as the cause:
    a StartupError, then a silent death, then other errors.
    """

    weight: int
    order: int
    error: Exception = field(compare=False)
