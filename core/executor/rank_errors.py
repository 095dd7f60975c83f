"""Errors of ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


class RankFailed(RuntimeError):
    """A rank died, raised, or sampled other tokens than rank 0."""


class RankDied(RankFailed):
    """A rank ended without reporting why.

    Args:
        capture: the bucket whose capture was in progress and may be the cause; empty: none.
    """

    def __init__(self, message: str, capture: str = "") -> None:
        super().__init__(message)
        self.capture = capture


@dataclass(order=True)
class RankError:
    """A failure of a rank. The lowest one is reported as the cause.

    A StartupError has weight 0, a death without report 1, other errors 2; ``order`` breaks ties.
    """

    weight: int
    order: int
    error: Exception = field(compare=False)
