"""The arrows between packages, the torch-free half, and no import cycle, over the real imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "backends", "multimodal", "server", "trencadis", "assets")

ALLOWED = {
    "core": {"core"},
    "backends": {"backends", "core"},
    "multimodal": {"multimodal", "core"},
    "server": {"server", "multimodal", "core", "assets"},
    "assets": {"assets"},
    "trencadis": {"trencadis", "server", "multimodal", "core", "assets"},
}

TORCH_FREE = [
    *(f"core/{n}.py" for n in ("config", "envs", "request", "step", "buckets", "launch", "memory_plan", "errors")),
    *(f"core/{n}.py" for n in ("wire", "scheduler", "lifecycle", "choice", "media", "engine", "inputs", "uniform")),
    *(f"core/{n}.py" for n in ("ranges", "bucket_env", "bucket_file", "closure", "planner", "rectangles", "costs")),
    *(f"core/{n}.py" for n in ("progress", "journal", "pace", "failures", "heap")),
    *(
        f"core/{n}.py"
        for n in (
            "ledger",
            "graph_budget",
            "estimate",
            "measured",
            "devices",
            "planning",
            "replay",
            "compare",
            "baselines",
        )
    ),
    *(f"core/kv/{n}.py" for n in ("pool", "prefix", "arena")),
    "backends/hpu/policy.py",
    "backends/cuda/policy.py",
    "core/models/config.py",
    "core/proc.py",
    "core/executor/base.py",
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "server").rglob("*.py"))),
    *(
        f"multimodal/{n}.py"
        for n in (
            "media",
            "fetch",
            "decode",
            "decoder",
            "decode_process",
            "decode_worker",
            "jobs",
            "pipe",
            "pool",
            "sizes",
            "processor",
            "mrope",
            "packing",
            "placeholders",
            "images",
            "cache",
        )
    ),
]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "trencadis" else parts
    return ".".join(("trencadis", *(p for p in parts if p != "__init__")))


FILES = {name_of(p): p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))}


def imports(path: Path, lazy: bool = False, typing: bool = False) -> set[str]:
    """Modules that ``path`` imports at import time (and, if asked, inside functions or for type checkers only)."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not typing:
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            return
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{a.name}" for a in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("name", sorted(FILES))
def test_arrows(name: str) -> None:
    package = name.split(".")[1] if name.count(".") and name.split(".")[1] in PACKAGES else "trencadis"
    for imported in imports(FILES[name], lazy=True, typing=True):
        if imported.startswith("trencadis."):
            target = imported.split(".")[1]
            if target in PACKAGES:
                assert target in ALLOWED[package], f"{name} imports {imported}"
        assert imported.split(".")[0] not in {"core", "backends", "multimodal", "server", "assets"}, imported


def test_backends_do_not_see_each_other() -> None:
    for name, path in FILES.items():
        for own, other in (("cuda", "hpu"), ("hpu", "cuda"), ("cpu", "cuda"), ("cpu", "hpu")):
            if name.startswith(f"trencadis.backends.{own}"):
                assert not any(i.startswith(f"trencadis.backends.{other}") for i in imports(path, lazy=True))


NAMES_DEVICES = {"core/devices.py", "core/envs.py", "core/config.py", "server/plan_cli.py"}
"""The backends' string table, tables of variables and flags, and a usage text."""


def test_no_device_is_named_beside_its_table() -> None:
    for path in FILES.values():
        file = str(path.relative_to(ROOT))
        if file.split("/")[0] in ("core", "multimodal", "server") and file not in NAMES_DEVICES:
            found = re.findall(r"(?<![a-z])(?:hpu|habana|emulat)\w*", path.read_text(encoding="utf-8").lower())
            assert not found, f"{file} names {found[0]}"


def reach(name: str) -> set[str]:
    """Everything that importing ``name`` imports, module by module."""
    seen: set[str] = set()
    queue = [name]
    while queue:
        current = queue.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in FILES:
            queue += list(imports(FILES[current]))
            queue += [".".join(current.split(".")[:i]) for i in range(1, current.count(".") + 1)]
    return seen


@pytest.mark.parametrize("file", TORCH_FREE)
def test_torch_free_half(file: str) -> None:
    path = ROOT / file
    assert path.is_file(), "the list names a file that does not exist"
    heavy = {m for m in reach(name_of(path)) if m.split(".")[0] in {"torch", "transformers", "torchvision"}}
    assert not heavy, f"{file} imports {heavy}"


def test_no_import_cycle() -> None:
    graph = {n: {i for i in imports(p) if i in FILES and i != n} for n, p in FILES.items()}
    state: dict[str, int] = {}

    def visit(node: str, trail: list[str]) -> None:
        assert state.get(node) != 1, f"import cycle: {' -> '.join([*trail, node])}"
        if state.get(node) == 2:
            return
        state[node] = 1
        for following in graph[node]:
            visit(following, [*trail, node])
        state[node] = 2

    for node in graph:
        visit(node, [])


def test_transformers_is_imported_only_where_a_checkpoint_needs_it() -> None:
    users = {n for n, p in FILES.items() if any(i.split(".")[0] == "transformers" for i in imports(p, lazy=True))}
    assert users <= {"trencadis.server.text.tokenizer"}


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {name_of(p / "__init__.py") for q in PACKAGES for p in [ROOT / q, *(ROOT / q).rglob("*")]
             if (p / "__init__.py").is_file()}  # fmt: skip
    assert found == set(listed["packages"])
    assert "demo/*" in listed["package-data"]["trencadis.assets"]
    assert "py.typed" in listed["package-data"]["trencadis"]


def test_import_costs_nothing_and_works_from_elsewhere(tmp_path: Path) -> None:
    code = (
        "import sys, trencadis, trencadis.core.request; assert 'torch' not in sys.modules; print(trencadis.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
