"""Launches that run out of memory: ``HABANA_STUB_OOM=N`` fails the Nth at once, ``late:N`` in a later call.

``HABANA_STUB_GRAPH=N`` and ``late:N``: the card's graph compiler refuses the Nth graph of compile mode.
"""

from __future__ import annotations

import os

TEXT = "[Rank:0] FATAL ERROR :: MODULE:PT_SYNHELPER workspace Allocation of size ::1073741824 failed!"
LATE = "FATAL ERROR :: MODULE:PT_BRIDGE Exception in Launch thread...\nCheck $HABANA_LOGS/ for details" + TEXT
_late, _, _number = os.environ.get("HABANA_STUB_OOM", "").rpartition(":")
FAILS = int(_number or 0)

GRAPH = "Graph compile failed. synStatus=synStatus 26 [Generic failure]."
LOWERING = f"[Rank:0] FATAL ERROR :: MODULE:PT_BRIDGE Exception in Lowering thread...\n{GRAPH}"
_lowered, _, _graph = os.environ.get("HABANA_STUB_GRAPH", "").rpartition(":")
REFUSED = int(_graph or 0)

launches = 0
pending: list[str] = []


def reach() -> None:
    """Counts a launch; fails it, or a later call, if its number was asked for."""
    global launches
    surface()
    launches += 1
    if launches != FAILS:
        return
    if not _late:
        raise RuntimeError(TEXT)
    pending.append(LATE)


def refuse() -> None:
    """Fails a launch of a graph that was refused, or a later call."""
    if not _lowered:
        raise RuntimeError(GRAPH)
    pending.append(LOWERING)


def surface() -> None:
    """Raises the error of an earlier launch."""
    if pending:
        raise RuntimeError(pending.pop())
