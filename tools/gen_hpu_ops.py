"""Writes the table of operations that an emulated card knows, from a clone of the bridge's published source.

    python tools/gen_hpu_ops.py CLONE 1.19.0

CLONE is a git folder of HabanaAI/gaudi-pytorch-bridge. Names, types and lists are facts about the release; nothing else
is taken.
"""

from __future__ import annotations

import ast
import csv
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent.parent / "backends" / "hpu" / "emulator" / "ops"
OPS = "scripts/hpu_op.yaml"
LISTS = "python_packages/habana_frameworks/torch/dynamo/compile_backend/shared_layer.py"
CARDS = ("Gaudi2", "Gaudi3")
TYPES = {
    "BFloat16": "bfloat16", "Bool": "bool", "Byte": "uint8", "Char": "int8", "Double": "float64", "Float": "float32",
    "Float8_e4m3fn": "float8_e4m3fn", "Float8_e5m2": "float8_e5m2", "Half": "float16", "Int": "int32", "Long": "int64",
    "Short": "int16",
}  # fmt: skip


def shown(clone: str, path: str) -> str:
    """A file of the clone's newest commit."""
    return subprocess.run(
        ["git", "-C", clone, "show", f"HEAD:{path}"], check=True, capture_output=True, text=True
    ).stdout


def base(name: str) -> str:
    """``index_copy`` of ``index_copy_`` and ``index_copy.out``."""
    stem = name.split(".")[0]
    return stem if stem.startswith("__") else re.sub(r"(?<=[a-z0-9])_$", "", stem)


def types(entry: Any, card: str) -> set[str] | None:
    """The types that an entry names for a card, over all arguments; None where it names none."""
    found = (entry or {}).get("dtypes")
    if isinstance(found, dict):
        found = found.get(card, found)
    if isinstance(found, dict):
        found = [t for named in found.values() if isinstance(named, list) for t in named]
    return {TYPES.get(t, t.lower()) for t in found} if isinstance(found, list) else None


def sets(text: str) -> dict[str, set[str]]:
    """The module's sets of names."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Set) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = set(ast.literal_eval(node.value))
    return found


def rows(ops: dict[str, Any], lists: dict[str, set[str]]) -> Iterable[tuple[str, str, str, str]]:
    """(name, place in a compiled graph, types on Gaudi 2, types on Gaudi 3) of every operation."""
    graph, eager = lists["hpu_supported_op_list"], lists["hpu_fallback_op_list"]
    named: dict[str, list[Any]] = {}
    for name, entry in ops.items():
        named.setdefault(base(name), []).append(entry)
    for name in sorted({*named, *graph, *eager}):
        place = "eager" if name in eager else "graph" if name in graph else ""
        known = []
        for card in CARDS:
            each = [types(entry, card) for entry in named.get(name, ())]
            published = [t for t in each if t is not None]
            known.append(" ".join(sorted(set().union(*published))) if published and len(published) == len(each) else "")
        yield name, place if name in named else f"{place or 'graph'} only", known[0], known[1]


def main(clone: str, release: str) -> None:
    """Writes the file of one release."""
    found = rows(yaml.safe_load(shown(clone, OPS)), sets(shown(clone, LISTS)))
    with open(FOLDER / f"{release}.csv", "w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("name", "compiled", *(c.lower() for c in CARDS)))
        writer.writerows(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
