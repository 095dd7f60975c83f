"""What the PTX of a compiled kernel says of its loads, of dependent launches and of waits for products by warp groups,
and its machine code of the instructions of its loop.

Where two warp groups share a program, the wait for a product (``wgmma.wait_group``) is that of the own group alone: the
other one may still read its operands. So shared memory that a product read may be written only behind a barrier, or
where it is another stage of the pipeline, which no product has read since the barrier of this trip.
"""

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


PRODUCT_WAIT, BARRIER = re.compile(r"\bwgmma\.wait_group"), re.compile(r"\b(?:bar|barrier)\.(?:cta\.)?sync\S*\s+0\b")
COPY_IN = re.compile(r"\bcp\.async\.(?!wait|commit|mbarrier)[\w.]*shared|\bcp\.async\.bulk")
STORE = re.compile(r"\bst(?:\.\w+)*\.shared|\bstmatrix")
LABEL, BRANCH = re.compile(r"^\s*(\$\w+):"), re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")

GUARDED, STAGED, EXCHANGED, UNGUARDED = "barrier", "stage", "exchange", "none"
"""What stands between a wait for a product and the next write of shared memory; EXCHANGED: the write is of values that
threads exchange, at an offset at which the loop loads them again, and which is therefore no operand's.
"""

WEAKEST_FIRST = UNGUARDED, EXCHANGED, STAGED, GUARDED

NO_WAIT = "no wait"
"""A kernel without waits for products by warp groups, or of one group alone."""


def guard(ptx: str) -> str:
    """Returns the weakest of what stands behind the waits of ``ptx`` for products by warp groups; "" without any.

    A copy to another stage counts where its loop has a barrier, so that no group is a trip ahead of another one.
    """
    lines = ptx.splitlines()
    loops = _loops(lines)
    found = set[str]()
    for place, line in enumerate(lines):
        if PRODUCT_WAIT.search(line):
            inner = min(
                (loop for loop in loops if loop[0] <= place <= loop[1]), key=lambda x: x[1] - x[0], default=None
            )
            found.add(_behind(lines, place, inner))
    return next((kind for kind in WEAKEST_FIRST if kind in found), "")


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """Lines from a label to a branch back to it."""
    labels, found = dict[str, int](), list[tuple[int, int]]()
    for place, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = place
        for target in BRANCH.findall(line):
            if target in labels:
                found.append((labels[target], place))
    return found


def _behind(lines: list[str], place: int, loop: tuple[int, int] | None) -> str:
    """What comes first behind the wait at ``place``, on in its loop and then behind the loop."""
    around = [] if loop is None else [*lines[place + 1 : loop[1]], *lines[loop[0] : place]]
    after = lines[(place if loop is None else loop[1]) + 1 :]
    barred = any(BARRIER.search(x) for x in around)
    loaded = {m[1] for x in around if barred and (m := LOADED.search(x))}
    kinds = {_first(around, barred, loaded), _first(after, False, set())}
    return next(kind for kind in WEAKEST_FIRST if kind in kinds)


LOADED = re.compile(r"\bld(?:\.\w+)*\.shared\S*\s.*\[\s*%r\d+\s*\+\s*([1-9]\d*)\s*\]")
STORED = re.compile(r"\bst(?:\.\w+)*\.shared\S*\s+\[\s*%r\d+\s*\+\s*(\d+)\s*\]")


def _first(lines: list[str], barred: bool, loaded: set[str]) -> str:
    """What the first barrier or write of ``lines`` is; ``barred``: their loop has a barrier; ``loaded``: offsets of
    shared memory that it loads.
    """
    best = GUARDED
    for line in lines:
        if BARRIER.search(line) or PRODUCT_WAIT.search(line):
            return best
        if STORE.search(line):
            where = STORED.search(line)
            if where is None or where[1] not in loaded:
                return UNGUARDED
            best = EXCHANGED
        if COPY_IN.search(line):
            staged = STAGED if barred else UNGUARDED
            return min(best, staged, key=WEAKEST_FIRST.index)
    return best


ADDRESS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
JUMP = re.compile(r"\bBRA\S*\s+(?:!?UP\d,\s*)?(?:`\S+\s+)?(0x[0-9a-f]+)")
PRODUCTS = re.compile(r"\b(?:[HIQ]G?MMA|FFMA)\b")


def trip_instructions(sass: str) -> int:
    """Returns the instructions of a trip of the innermost loop with most products; 0 without a loop."""
    code = [(int(address, 16), text) for address, text in ADDRESS.findall(sass)]
    index = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, text) in enumerate(code):
        jump = JUMP.search(text)
        if jump is not None and int(jump[1], 16) < address and int(jump[1], 16) in index:
            loops.append((index[int(jump[1], 16)], i + 1))
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    products = [(sum(bool(PRODUCTS.search(t)) for _, t in code[a:b]), b - a) for a, b in inner]
    return max(products, default=(0, 0))[1]
