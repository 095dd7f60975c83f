"""docs/hardware.md says what was recorded, of every kernel there is."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "backends" / "cuda" / "kernels"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hardware_tool", ROOT / "tools" / "hardware.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["hardware_tool"] = made
    spec.loader.exec_module(made)
    return made


def test_the_page_is_what_the_records_say(tool: ModuleType) -> None:
    record = json.loads((tool.DOCS / tool.RECORD).read_text(encoding="utf-8"))
    assert (tool.DOCS / tool.PAGE).read_text(encoding="utf-8") == tool.page(record)


def test_every_launched_kernel_is_listed(tool: ModuleType) -> None:
    """A jit function that a launcher calls with a grid."""
    launched = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
    assert launched and launched == {f for k in tool.KERNELS for f in k.functions}


def test_what_has_no_record_is_not_claimed(tool: ModuleType) -> None:
    page = tool.page({})
    assert page.count("| not recorded | not recorded | no | no |") == len(tool.KERNELS)
    assert "No kernel has run on a card" in page and "--junitxml card.xml" in page
    tests = {"test_head": {"passed": 3, "failed": 1}}
    told = tool.page({"cards": {"NVIDIA X": {"date": "d", "tests": tests}}})
    assert "NVIDIA X: 3 / 1" in told and "No kernel has run" not in told
