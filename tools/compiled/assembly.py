"""What the PTX of a compiled kernel says of its loads and of dependent launches."""

from __future__ import annotations

import re
from typing import NamedTuple

COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(0x[0-9a-fA-F]+|\d+)")
LOAD = re.compile(r"\bld(?:\.\w+)*\.global(?:[.:]+\w+)*?(?:\.v(\d))?\.[a-z](\d+)\s")
WAIT, TELL, FETCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents", "prefetch.global.L2"


class Assembly(NamedTuple):
    """Instructions of one kernel.

    Args:
        copies: bytes -> copies from global to shared memory that move so many a thread.
        loads: bytes -> loads from global memory into registers.
        waits, tells: waits for the launches before, and permissions for the next one.
        fetched: prefetches ahead of the first wait.
    """

    copies: dict[int, int]
    loads: dict[int, int]
    waits: int
    tells: int
    fetched: int


def read(ptx: str) -> Assembly:
    """Counts instructions of ``ptx``."""
    copies, loads = dict[int, int](), dict[int, int]()
    for size in COPY.findall(ptx):
        copies[int(size, 0)] = copies.get(int(size, 0), 0) + 1
    for vector, bits in LOAD.findall(ptx):
        width = int(vector or 1) * int(bits) // 8
        loads[width] = loads.get(width, 0) + 1
    ahead = ptx.partition(WAIT)[0]
    return Assembly(copies, loads, ptx.count(WAIT), ptx.count(TELL), ahead.count(FETCH) if WAIT in ptx else 0)
