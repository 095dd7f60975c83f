"""docs/hardware.md says what was recorded, of every kernel there is."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tools import hardware

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "backends" / "cuda" / "kernels"


def test_the_page_is_what_the_records_say() -> None:
    record = json.loads((hardware.DOCS / hardware.RECORD).read_text(encoding="utf-8"))
    assert (hardware.DOCS / hardware.PAGE).read_text(encoding="utf-8") == hardware.page(record)


def launches() -> set[str]:
    """Jit functions that a launcher calls with a grid, itself or by a launcher that takes the kernel as an argument."""
    functions = [
        node
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    found, shared = set(), {}
    for function in functions:
        names = [a.arg for a in function.args.args]
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = ast.unparse(node.func.value)
                if kernel in names:
                    shared[function.name] = names.index(kernel)
                else:
                    found.add(kernel)
    calls = (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call))
    return found | {ast.unparse(c.args[shared[ast.unparse(c.func)]]) for c in calls if ast.unparse(c.func) in shared}


def test_every_launched_kernel_is_listed() -> None:
    assert launches() == {f for k in hardware.KERNELS for f in k.functions}
    assert [k.file for k in hardware.KERNELS if not (KERNELS / f"{k.file}.py").is_file()] == []


def test_what_has_no_record_is_not_claimed() -> None:
    page = hardware.page({})
    assert page.count("| not recorded | not recorded | no | no |") == len(hardware.KERNELS)
    assert "No kernel has run on a card" in page and "--junitxml card.xml" in page
    tests = {"test_head": {"passed": 3, "failed": 1}}
    reported = hardware.page({"cards": {"NVIDIA X": {"date": "d", "tests": tests}}})
    assert "NVIDIA X: 3 / 1" in reported and "No kernel has run" not in reported
