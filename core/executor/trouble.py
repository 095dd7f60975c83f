"""What goes wrong with ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


class RankFailed(RuntimeError):
    """A rank died, raised, or sampled other tokens than rank 0."""


class RankDied(RankFailed):
    """A rank ended without reporting why."""


@dataclass(order=True)
class Trouble:
    """A failure of a rank. The least is taken as the cause: a StartupError, then a silent death, then other errors."""

    weight: int
    order: int
    error: Exception = field(compare=False)
