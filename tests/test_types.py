"""Types that say something: few values of type ``Any``, and named results of three or more values."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.syntax import parse

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("core", "backends", "multimodal", "server", "trencadis")

MOST_ANY = 794
"""Most uses of ``Any`` in the product. JSON has names in core/json_types.py, values of flags have one in
core/flag_declaration.py; for a value that is only passed on or checked, ``object`` says as much and is checked.
"""

WORTH_PARSING = re.compile(r"\bAny\b|->[^:]*\btuple\[[^\]]*,[^\]]*,")
"""Text of a file that may break a rule of this module; parsing the others would take seconds."""


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Every node of each file of the product that may break a rule; read and parsed once."""
    files = (path for part in PARTS for path in sorted((ROOT / part).rglob("*.py")))
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in files}
    return {file: list(ast.walk(parse(ROOT / file))) for file, text in texts.items() if WORTH_PARSING.search(text)}


def _is_fixed_tuple(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "tuple"):
        return False
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
    return len(items) > 2 and not any(isinstance(item, ast.Constant) and item.value is ... for item in items)


def test_any_is_rare() -> None:
    counts = {
        file: sum(isinstance(node, ast.Name) and node.id == "Any" for node in found) for file, found in nodes().items()
    }
    most = sorted(counts.items(), key=lambda item: -item[1])[:10]
    assert sum(counts.values()) <= MOST_ANY, f"name the types; the files with most: {most}"


def test_results_of_three_or_more_values_have_names() -> None:
    found = [
        f"{file}:{node.lineno} {node.name}"
        for file, inside in nodes().items()
        for node in inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None
        if any(map(_is_fixed_tuple, ast.walk(node.returns)))
    ]
    assert found == [], "return a NamedTuple"
