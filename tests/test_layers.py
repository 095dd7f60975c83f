"""Folders on floors: no import goes up, and few modules import torch; no cycle of any kind."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.syntax import parse, within

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "backends", "multimodal", "server", "trencadis", "assets")
EVERY = frozenset({"*"})


FLOORS = {
    "core": (
        ("core",),
        ("core/kv", "core/links", "core/quant"),
        ("core/device",),
        ("core/checkpoint", "core/token_masks"),
        ("core/family_configs", "core/models", "core/process", "core/shapes", "core/spec"),
        ("core/lora", "core/memory", "core/scheduling"),
        ("core/graphs",),
        ("core/launches",),
        ("core/executor", "core/quant/writing"),
        ("core/engine",),
    ),
    "multimodal": (
        ("multimodal", "multimodal/decode_workers"),
        ("multimodal/sources",),
        ("multimodal/images",),
        ("multimodal/videos", "multimodal/vit"),
        (
            "multimodal/gemma3", "multimodal/gemma4", "multimodal/idefics3", "multimodal/internvl",
            "multimodal/lfm2_vl", "multimodal/minicpmv4_6", "multimodal/mllama", "multimodal/pixtral",
            "multimodal/qwen2_vl",
        ),
        ("multimodal/glm4v", "multimodal/llava", "multimodal/qwen2_5_vl", "multimodal/qwen3_vl"),
        ("multimodal/llava_next", "multimodal/phi3_v"),
    ),
    "server": (
        ("server/config", "server/engine", "server/page", "server/protocol", "server/tenants", "server/text"),
        ("server/bench", "server/grammars", "server/metrics", "server/plan"),
        ("server/tools",),
        ("server/prompts",),
        ("server/routes",),
        ("server/http",),
        ("server/processes",),
        ("server/cli",),
        ("server",),
    ),
}  # fmt: skip
"""The folders of each part of the product from the ground up. A module imports from its own folder and from floors
below, also inside functions and for type checkers. Folder ``server`` holds ``__main__`` alone.
"""

MOST_ARROWS = {"core": 110, "multimodal": 42, "server": 45}
"""Most pairs of folders, one of which imports from the other."""

PARTS = {
    "assets": (),
    "core": (),
    "multimodal": ("core",),
    "server": ("assets", "core", "multimodal"),
    "trencadis": ("assets", "core", "multimodal", "server"),
}
"""Part of the product -> the parts that it may import."""

IMPORTS_TRENCADIS = ("server/bench", "server/cli")
"""The folders of the server that may import the offline API."""

BACKENDS = {
    "backends": (),
    "backends/conformance": ("core", "backends/.", "backends/cpu"),
    "backends/conformance/check_model": ("core", "backends/cpu", "backends/conformance"),
    "backends/cpu": ("core",),
    "backends/cpu/native": ("core",),
    "backends/cuda": ("core", "backends/.", "backends/cpu"),
    "backends/cuda/kernels/peers": ("core", "backends/cuda/kernels"),
    "backends/cuda/kernels": ("core", "backends/cuda/weights"),
    "backends/cuda/kernels/layers": ("core", "backends/cpu", "backends/cuda/kernels", "backends/cuda/weights"),
    "backends/cuda/launches": ("core", "backends/cpu", "backends/cuda/.", "backends/cuda/kernels"),
    "backends/cuda/attention_libraries": ("core", "backends/cuda/.", "backends/cuda/kernels", "backends/cuda/launches"),
    "backends/cuda/cpu_twin": ("core", "backends/.", "backends/cpu", "backends/cuda/.", "backends/cuda/weights"),
    "backends/cuda/time_estimates": ("core", "backends/cuda/.", "backends/cuda/launches", "backends/cuda/weights"),
    "backends/cuda/weights": ("core",),
    "backends/hpu": ("core", "backends/.", "backends/cpu"),
    "backends/hpu/attention": ("core", "backends/hpu/."),
    "backends/hpu/emulator": ("core", "backends/hpu/.", "backends/hpu/start"),
    "backends/hpu/launches": ("core", "backends/cpu", "backends/hpu/.", "backends/hpu/attention"),
    "backends/hpu/start": ("core", "backends/hpu/.", "backends/hpu/emulator", "backends/hpu/launches"),
}
"""Folder of a backend -> what it may import besides itself and what lies below it; ``x/.``: that folder's own files."""

TORCH: dict[str, frozenset[str]] = {
    "core/checkpoint": frozenset(
        {
            "checkpoint_weight_source",
            "pytorch_bin",
            "quantised_tensor_readers",
            "weight_file_reader",
            "weight_source_interface",
        }
    ),
    "core/device": frozenset({"backend", "launch_tensors"}),
    "core/engine": frozenset({"device_startup", "engine_builder", "kv_offload_setup"}),
    "core/executor": frozenset({"rendezvous", "multiproc_executor"}),
    "core/graphs": frozenset(
        {"graph_capture_within_memory_budget", "graph_manager", "graph_reporter", "live_plan_change", "warmup"}
    ),
    "core/lora": frozenset({"adapter_store"}),
    "core/launches": frozenset(
        {
            "draft_loading",
            "draft_runner",
            "encoder_data_parallel",
            "host_block_copies",
            "model_runner",
            "kv_cache_and_state_allocation",
        }
    ),
    "core/models": EVERY,
    "core/quant": frozenset({"online_quant", "quantised_tensor"}),
    "core/quant/writing": EVERY,
    "multimodal/gemma3": frozenset({"model"}),
    "multimodal/gemma4": frozenset({"model"}),
    "multimodal/glm4v": frozenset({"model"}),
    "multimodal/lfm2_vl": frozenset({"model"}),
    "multimodal/idefics3": frozenset({"model"}),
    "multimodal/internvl": frozenset({"model"}),
    "multimodal/llava": frozenset({"model"}),
    "multimodal/llava_next": frozenset({"model"}),
    "multimodal/minicpmv4_6": frozenset({"model"}),
    "multimodal/mllama": frozenset({"model"}),
    "multimodal/phi3_v": frozenset({"model"}),
    "multimodal/pixtral": frozenset({"model"}),
    "multimodal/qwen2_5_vl": frozenset({"model"}),
    "multimodal/qwen2_vl": frozenset({"model"}),
    "multimodal/qwen3_vl": frozenset({"model"}),
    "multimodal/vit": frozenset({"tile_vision_model", "vit_block"}),
    "backends/conformance": EVERY,
    "backends/conformance/check_model": EVERY,
    "backends/cpu": EVERY,
    "backends/cpu/native": EVERY,
    "backends/cuda": EVERY,
    "backends/cuda/kernels": EVERY,
    "backends/cuda/kernels/layers": EVERY,
    "backends/cuda/kernels/peers": EVERY,
    "backends/cuda/launches": EVERY,
    "backends/cuda/attention_libraries": frozenset(
        {"attention_library_selector", "library_attention", "ops_with_attention_library", "startup_comparison"}
    ),
    "backends/cuda/time_estimates": frozenset({"meta_launch_recorder"}),
    "backends/cuda/cpu_twin": EVERY,
    "backends/cuda/weights": EVERY,
    "backends/hpu": EVERY,
    "backends/hpu/attention": EVERY,
    "backends/hpu/emulator": EVERY,
    "backends/hpu/launches": EVERY,
    "backends/hpu/start": EVERY,
}
"""Folder -> its modules that may import torch, also through others; all other modules load without torch."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "trencadis" else parts
    return ".".join(("trencadis", *(p for p in parts if p != "__init__")))


FILES = {name_of(p): p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))}


def package_of(path: Path) -> str:
    """``core/kv`` of ``core/kv/block_pool.py``."""
    return str(path.relative_to(ROOT).parent)


@cache
def imported(path: Path) -> tuple[tuple[frozenset[str], bool, bool], ...]:
    """What each import of ``path`` names, whether it stands inside a function, whether it is for type checkers only."""
    found: list[tuple[frozenset[str], bool, bool]] = []

    def visit(node: ast.AST, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.append((frozenset(a.name for a in node.names), lazy, typing))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
            found.append((frozenset(names), lazy, typing))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.body:
                visit(statement, lazy, True)
            for statement in node.orelse:
                visit(statement, lazy, typing)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in within(node):
                visit(child, lazy or inside, typing)

    visit(parse(path), False, False)
    return tuple(found)


@cache
def imports(path: Path, lazy: bool = False, typing: bool = False) -> frozenset[str]:
    """Modules that ``path`` imports at import time (and, if asked, inside functions or for type checkers only)."""
    requested = (names for names, inside, checked in imported(path) if lazy >= inside and typing >= checked)
    return frozenset().union(*requested)


FOLDERS = sorted({package_of(p) for p in FILES.values()})
LEVELS = {folder: level for part in FLOORS.values() for level, floor in enumerate(part) for folder in floor}


def modules(package: str) -> list[str]:
    return sorted(name for name, path in FILES.items() if package_of(path) == package)


def targets(package: str) -> set[str]:
    """The other folders that modules of ``package`` import from, in any way."""
    found = {i for name in modules(package) for i in imports(FILES[name], lazy=True, typing=True)}
    bare = {i for i in found if i.split(".")[0] in {"core", "backends", "multimodal", "server", "assets"}}
    assert not bare, f"{package} imports {bare} without the package's name"
    return {package_of(FILES[i]) for i in found if i in FILES and i != "trencadis"} - {package}


def test_every_folder_has_its_place() -> None:
    listed = {f for f in FOLDERS if f.split("/")[0] in FLOORS}
    assert listed == set(LEVELS), "a folder lacks its floor, or a floor names a folder that is gone"
    assert {f for f in FOLDERS if f.startswith("backends")} == set(BACKENDS)
    for folder, stems in TORCH.items():
        there = {p.stem for p in FILES.values() if package_of(p) == folder}
        assert stems == EVERY or stems <= there, f"{folder}: {stems - there} is gone"


@pytest.mark.parametrize("package", [f for f in FOLDERS if not f.startswith("backends")])
def test_arrows(package: str) -> None:
    """No import goes up, neither between parts nor between floors."""
    part = package.split("/")[0]
    for target in targets(package):
        other = target.split("/")[0]
        if other != part:
            allowed = PARTS[part] + (("trencadis",) if package in IMPORTS_TRENCADIS else ())
            assert other in allowed, f"{package} imports from {target}"
        elif part in FLOORS:
            assert LEVELS[target] < LEVELS[package], f"{package} imports from {target}, which is not below it"


@pytest.mark.parametrize("package", sorted(BACKENDS))
def test_arrows_of_backends(package: str) -> None:
    for target in targets(package):
        within = (package, *BACKENDS[package])
        fits = any(target == other.removesuffix("/.") or target.startswith(other + "/") for other in within)
        assert fits, f"{package} imports from {target}"


def test_each_part_stays_small() -> None:
    """core: at most 26 folders and 10 floors; server: 16 folders on 8 floors (and its own); few pairs that import."""
    assert len([f for f in LEVELS if f.startswith("core")]) <= 26 and len(FLOORS["core"]) <= 10
    assert len([f for f in LEVELS if f.startswith("server/")]) <= 16 and len(FLOORS["server"]) <= 9
    for part, most in MOST_ARROWS.items():
        arrows = [(f, t) for f in LEVELS if f.split("/")[0] == part for t in targets(f) if t.split("/")[0] == part]
        assert len(arrows) <= most, f"{part}: {len(arrows)} pairs of folders"


def test_backends_do_not_see_each_other() -> None:
    for name, path in FILES.items():
        for own, other in (("cuda", "hpu"), ("hpu", "cuda"), ("cpu", "cuda"), ("cpu", "hpu")):
            if name.startswith(f"trencadis.backends.{own}"):
                assert not any(i.startswith(f"trencadis.backends.{other}") for i in imports(path, lazy=True))


NAMES_DEVICES = {
    "core/devices.py", "core/envs.py", "core/engine_config.py", "server/plan/plan_command.py", "server/cli/main.py",
    "server/cli/collect_env.py",
    "server/config/vllm_engine_flags.py", "server/config/vllm_flag_and_env_table.py",
}  # fmt: skip
"""The backends' string table, tables of variables, flags and packages, and two usage texts."""


def test_no_device_is_named_beside_its_table() -> None:
    for path in FILES.values():
        file = str(path.relative_to(ROOT))
        if file.split("/")[0] in ("core", "multimodal", "server") and file not in NAMES_DEVICES:
            found = re.findall(r"(?<![a-z])(?:hpu|habana|emulat)\w*", path.read_text(encoding="utf-8").lower())
            assert not found, f"{file} names {found[0]}"


@cache
def direct(name: str) -> frozenset[str]:
    """What importing ``name`` imports first: the modules that it names, and the packages that it lies in."""
    parents = {name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)}
    return (imports(FILES[name]) | parents) if name in FILES else frozenset()


def reach(name: str) -> set[str]:
    """Everything that importing ``name`` imports, module by module."""
    seen: set[str] = set()
    queue = [name]
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            queue += direct(current) - seen
    return seen


@pytest.mark.parametrize("package", FOLDERS)
def test_torch_free_half(package: str) -> None:
    """Every module that ``TORCH`` does not name, and the policies of each device."""
    rule = TORCH.get(package, frozenset())
    for name in modules(package):
        path = FILES[name]
        policy = path.name == "policy.py" and package != "backends/cpu"
        if policy or (rule != EVERY and path.stem not in rule):
            heavy = {m for m in reach(name) if m.split(".")[0] in {"torch", "transformers", "torchvision"}}
            assert not heavy, f"{name} imports {heavy}"


@pytest.mark.parametrize(("lazy", "typing"), [(False, False), (True, False), (True, True)])
def test_no_import_cycle(lazy: bool, typing: bool) -> None:
    """None at import time, none through imports inside functions, none through those for type checkers."""
    graph = {n: {i for i in imports(p, lazy, typing) if i in FILES and i != n} for n, p in FILES.items()}
    state: dict[str, int] = {}

    def visit(node: str, trail: list[str]) -> None:
        assert state.get(node) != 1, f"import cycle: {' -> '.join([*trail[trail.index(node) :], node])}"
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
    assert users <= {
        "trencadis.server.text.checkpoint_tokenizer",
        "trencadis.backends.conformance.check_model.transformers_oracle",
    }


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
