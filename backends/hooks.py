"""What a backend may offer to be checked more closely; none of it is needed to serve."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

CAPTURE, STEP = "capture", "step"


@dataclass(frozen=True)
class Hooks:
    """The attribute ``hooks`` of a backend; each member may be None.

    Args:
        run_out: ``run_out("capture")``, ``run_out("step")``: the next capture, or the next run or replay, finds no
            memory. It must fail as a real one does: with what the device raises, from where it raises it.
        no_sync: while open, a launch that waits for the device raises.
    """

    run_out: Callable[[str], None] | None = None
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None


def hooks_of(backend: Any) -> Hooks:
    """Those of ``backend``; none where it offers none."""
    found = getattr(backend, "hooks", None)
    return found if isinstance(found, Hooks) else Hooks()
