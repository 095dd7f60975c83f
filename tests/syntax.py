"""Python source, parsed once for all tests of a process, and its statements.

No expression holds an import or a definition, and expressions are most of a tree.
"""

from __future__ import annotations

import ast
import gc
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def parse(path: Path) -> ast.Module:
    """The tree of a file, which nobody changes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # Else the collector walks all trees again and again, for twice the time of parsing. tests/conftest.py has another
    # ``gc.freeze``, which counts all objects at each call.
    inspect.unwrap(gc.freeze)()
    return tree


def within(node: ast.AST) -> Iterator[ast.AST]:
    """The statements directly inside ``node``, handlers of exceptions and cases of a match among them."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        inside = getattr(node, field, ())
        if isinstance(inside, list):  # a lambda and a conditional expression have one expression there
            yield from inside


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement of a module, in functions and classes too."""
    for node in within(tree):
        yield node
        yield from statements(node)
