"""Reads hand-written buckets: the file of VLLM_BUCKETING_FROM_FILE. Pure Python; nothing in it is executed.

Each line is a bucket or a set of buckets: ``(rows, query tokens, blocks)``. Each item is a number, a list of numbers,
or ``range(start, stop[, step])``; a line stands for the product of its items. ``#`` begins a comment. Query 1 is a
decode bucket, whose blocks are those of the whole batch; otherwise the blocks are one row's context.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import NamedTuple

from trencadis.core.errors import StartupError

MOST = 10_000
"""Largest number of elements of one range."""


class FileBucket(NamedTuple):
    """One bucket of the file; ``query`` counts tokens per row."""

    rows: int
    query: int
    blocks: int


def read_file(path: str, name: str) -> tuple[FileBucket, ...]:
    """Returns the buckets of ``path``, ascending; ``name`` is the variable that named the file.

    Raises:
        StartupError: the file cannot be read, a line is no bucket, or there are no buckets.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise StartupError(f"{name}={path}: {reason}.") from None
    found: set[FileBucket] = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                found.update(_line(text))
            except ValueError as error:
                raise StartupError(f"{name}={path}, line {number}: {text[:60]!r} {error}.") from None
    if not found:
        raise StartupError(f"{name}={path}: no bucket; a line is (rows, query tokens, blocks).")
    return tuple(sorted(found))


def _line(text: str) -> list[FileBucket]:
    """Returns the buckets of one line; raises ValueError with a description of the error."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError("is no (rows, query tokens, blocks)") from None
    if not isinstance(node, ast.Tuple) or len(node.elts) != 3:
        raise ValueError("must hold three items: (rows, query tokens, blocks)")
    rows, query, blocks = (_item(e) for e in node.elts)
    if min(rows) < 1 or min(query) < 1 or min(blocks) < 0:
        raise ValueError("must have rows and tokens of at least 1 and blocks of at least 0")
    return [FileBucket(*dims) for dims in itertools.product(rows, query, blocks)]


def _item(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List) and node.elts:
        return [_number(e) for e in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = [_number(a) for a in node.args]
        if node.keywords or not 2 <= len(bounds) <= 3 or (len(bounds) == 3 and bounds[2] == 0):
            raise ValueError("has a range that is not range(start, stop[, step])")
        values = range(*bounds)
        if not 0 < len(values) <= MOST:
            raise ValueError(f"has a range of {len(values)} elements; 1 to {MOST} are allowed")
        return list(values)
    return [_number(node)]


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("holds something other than numbers, lists and ranges")
