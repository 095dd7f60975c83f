"""What a compilation depends on, as one short key: ``tools/kernel_resources.py`` compiles what has a new one.

A key is of the source of a kernel and of the functions that it calls, without their docstrings, comments and places in
a file; of the constants of their modules that they name; and of argument types, options, architecture and Triton's
version.
"""

from __future__ import annotations

import ast
import hashlib
import json
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

FIGURES = ("registers", "stack", "shared", "error", "wait", "trip")
"""What a compilation tells; the rest of a line follows from the launch."""

Known = dict[str, dict[str, Any]]
"""Key -> ``FIGURES``."""


def key_of(launch: Any, arch: int, version: str) -> str:
    """16 digits for one launch (``kernel_resources.Launch``) on one architecture."""
    parts = (
        sorted(sources(launch.kernel).items()), sorted(launch.signature.items()),
        sorted((name, repr(value)) for name, value in launch.constants.items()), sorted(launch.divisible),
        sorted(launch.options.items()), arch, version,
    )  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@cache
def sources(kernel: Any) -> dict[str, str]:
    """Name -> code of a Triton function and of all that it reaches; constants by their values."""
    found: dict[str, str] = {}
    _reach(kernel, found)
    return found


def _reach(function: Any, found: dict[str, str]) -> None:
    plain = function.fn
    name = f"{plain.__module__}.{plain.__qualname__}"
    if name in found:
        return
    tree = ast.parse(textwrap.dedent(function.src))
    body: Any = tree.body[0]
    if isinstance(body.body[0], ast.Expr) and isinstance(body.body[0].value, ast.Constant):
        del body.body[0]
    found[name] = ast.dump(tree)
    for node in ast.walk(tree):
        value = _named(node, plain.__globals__)
        if hasattr(value, "fn") and hasattr(value, "src"):
            _reach(value, found)
        elif type(value).__name__ == "constexpr" or isinstance(value, int | float | str):
            found[f"{name}: {ast.unparse(node)}"] = repr(getattr(value, "value", value))


def _named(node: ast.AST, scope: dict[str, Any]) -> Any:
    """What a name, or a name of one of our modules, stands for."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = scope.get(node.value.id)
        if isinstance(owner, ModuleType) and not owner.__name__.startswith("triton"):
            return getattr(owner, node.attr, None)
    return None


class Progress:
    """Figures by key, a line each, appended as they come: what was compiled before an interruption stays."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def known(self) -> Known:
        """All lines; one that was cut off is left out."""
        if not self.path.is_file():
            return {}
        found: Known = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):
                entry = json.loads(line)
                found[entry.pop("key")] = entry
        return found

    def add(self, key: str, seconds: float, figures: dict[str, Any]) -> None:
        """One write, so that several processes may add at a time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(
            {"key": key, "seconds": round(seconds, 2), **{n: figures[n] for n in FIGURES if n in figures}}
        )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
