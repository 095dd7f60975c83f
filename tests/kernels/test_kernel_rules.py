"""Rules that neither the interpreter nor a compiler would enforce, over the text of every kernel."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "backends" / "cuda" / "kernels"
FILES = sorted(KERNELS.rglob("*.py"))


def calls(path: Path) -> list[ast.Call]:
    return [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_dot_products_name_their_precision(path: Path) -> None:
    """TF32 is what a GPU takes for float32 unless told otherwise, and the interpreter does not show it."""
    for call in calls(path):
        if ast.unparse(call.func) in ("tl.dot", "tl.dot_scaled"):
            named = {k.arg: ast.unparse(k.value) for k in call.keywords}
            assert "input_precision" in named, f"{path.name}:{call.lineno}: tl.dot without input_precision"
            assert "tf32" not in named["input_precision"], f"{path.name}:{call.lineno}: TF32"


COMPILED_ALONE = {
    "tl.inline_asm_elementwise": ("dependent_launch.py", "quantised_fused_moe.py", "code_decoding.py"),
}
"""Calls that are made only where kernels are compiled for a card; the interpreter takes another branch."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_nothing_that_the_interpreter_lacks(path: Path) -> None:
    for call in calls(path):
        if path.name in COMPILED_ALONE.get(ast.unparse(call.func), ()):
            continue
        name = ast.unparse(call.func)
        assert "inline_asm" not in name and "libdevice" not in name, f"{path.name}:{call.lineno}: {name}"
        tuned = name in ("triton.autotune", "triton.heuristics")
        assert not tuned, f"{path.name}:{call.lineno}: tiles stand in tables"
