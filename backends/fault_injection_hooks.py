"""Optional hooks through which a backend lets the checks fail its allocations and forbid waiting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

CAPTURE, STEP = "capture", "step"


@dataclass(frozen=True)
class Hooks:
    """The attribute ``hooks`` of a backend; each member may be None.

    Args:
        run_out: ``run_out("capture")`` makes the next capture run out of memory, ``run_out("step")`` the next run or
            replay. It must raise what the device raises, from the same place.
        no_sync: a context manager; inside, a launch that waits for the device raises.
    """

    run_out: Callable[[str], None] | None = None
    no_sync: Callable[[], AbstractContextManager[object]] | None = None


def hooks_of(backend: object) -> Hooks:
    """Returns the hooks of ``backend``; empty hooks if it has no such attribute."""
    found = getattr(backend, "hooks", None)
    return found if isinstance(found, Hooks) else Hooks()
