"""One rule a package: what it may import, and which of its modules may import torch; no cycle of any kind."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.syntax import within

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "backends", "multimodal", "server", "trencadis", "assets")
EVERY = frozenset({"*"})


class Rule(NamedTuple):
    """What a package may import beside itself and what lies below it, and which of its modules may reach torch.

    A name includes the packages below it; ``backends/.`` is that folder's own files alone.
    """

    imports: tuple[str, ...]
    torch: frozenset[str] = frozenset()


def torch(*modules: str) -> frozenset[str]:
    return frozenset(modules)


RULES = {
    "assets": Rule(()),
    "core": Rule(("core",), torch("backend")),
    "core/checkpoint": Rule(("core",)),
    "core/kv": Rule(("core",)),
    "core/layers": Rule(("core",), EVERY),
    "core/families": Rule(("core",)),
    "core/models": Rule(
        ("core", "core/layers"),
        torch(
            "pytorch_bin",
            "checkpoint_source",
            "cross_attention_decoder",
            "decoder",
            "interface",
            "weight_loader",
            "stage_entry",
        ),
    ),
    "core/shapes": Rule(("core",)),
    "core/memory": Rule(("core", "core/shapes")),
    "core/graphs": Rule(
        ("core", "core/memory"),
        torch("graph_capture", "graph_manager", "activation_profile", "warmup", "graph_reporter"),
    ),
    "core/launches": Rule(
        ("core", "core/graphs", "core/memory", "core/models", "core/shapes"),
        torch("encoder_data_parallel", "host_block_copies", "persistent_tensors", "model_runner", "launch_tensors"),
    ),
    "core/links": Rule(("core",)),
    "core/masks": Rule(("core",)),
    "core/scheduling": Rule(("core", "core/kv", "core/spec")),
    "core/spec": Rule(("core",)),
    "core/process": Rule(("core", "core/links")),
    "core/quant": Rule(("core",), torch("kv_cache_codes", "online_quant", "quantised_tensor")),
    "core/quant/formats": Rule(("core", "core/quant"), EVERY),
    "core/quant/writing": Rule(("core",), EVERY),
    "core/executor": Rule(
        ("core", "core/launches", "core/links", "core/process"),
        torch("process_groups", "launcher_choice", "multiproc_executor"),
    ),
    "core/executor/on_ray": Rule(("core", "core/executor", "core/links")),
    "core/startup": Rule(("core",), torch("engine_builder", "graph_startup", "kv_offload_setup")),
    "backends": Rule(()),
    "backends/conformance": Rule(("core", "backends/.", "backends/cpu"), EVERY),
    "backends/conformance/family": Rule(("core", "backends/cpu", "backends/conformance"), EVERY),
    "backends/cpu": Rule(("core",), EVERY),
    "backends/cpu/native": Rule(("core",), EVERY),
    "backends/cuda": Rule(("core", "backends/.", "backends/cpu"), EVERY),
    "backends/cuda/kernels/peers": Rule((), EVERY),
    "backends/cuda/kernels": Rule(
        ("core", "backends/cuda/weights", "backends/cuda/kernels/coded", "backends/cuda/kernels/layers"), EVERY
    ),
    "backends/cuda/kernels/coded": Rule(("core", "backends/cuda/weights", "backends/cuda/kernels"), EVERY),
    "backends/cuda/kernels/experts": Rule(("core", "backends/cuda/kernels"), EVERY),
    "backends/cuda/kernels/layers": Rule(("core", "backends/cpu", "backends/cuda/kernels"), EVERY),
    "backends/cuda/kernels/cross_attention": Rule(("core", "backends/cuda/kernels"), EVERY),
    "backends/cuda/launches": Rule(("core", "backends/cpu", "backends/cuda/.", "backends/cuda/kernels"), EVERY),
    "backends/cuda/libraries": Rule(
        ("core", "backends/cuda/.", "backends/cuda/kernels", "backends/cuda/launches"),
        torch("selector", "library_launch", "flash_attn", "flashinfer", "ops", "attention_backend"),
    ),
    "backends/cuda/twin": Rule(
        ("core", "backends/.", "backends/cpu", "backends/cuda/.", "backends/cuda/weights"), EVERY
    ),
    "backends/cuda/timing": Rule(
        ("core", "backends/cuda/.", "backends/cuda/launches"),
        torch("kernel_recorder"),
    ),
    "backends/cuda/weights": Rule(("core",), EVERY),
    "backends/hpu": Rule(("core", "backends/.", "backends/cpu"), EVERY),
    "backends/hpu/attention": Rule(("core", "backends/hpu/."), EVERY),
    "backends/hpu/emulator": Rule(("core", "backends/hpu/.", "backends/hpu/start"), EVERY),
    "backends/hpu/emulator/compiled": Rule(("core", "backends/hpu/.", "backends/hpu/emulator"), EVERY),
    "backends/hpu/emulator/recipes": Rule(("core",)),
    "backends/hpu/launches": Rule(("core", "backends/cpu", "backends/hpu/.", "backends/hpu/attention"), EVERY),
    "backends/hpu/start": Rule(("core", "backends/hpu/.", "backends/hpu/emulator"), EVERY),
    "multimodal": Rule(("core",)),
    "multimodal/decode_workers": Rule(("core", "multimodal")),
    "multimodal/sources": Rule(("core", "multimodal")),
    "multimodal/images": Rule(("core", "multimodal", "multimodal/sources", "multimodal/decode_workers")),
    "multimodal/videos": Rule(("core", "multimodal")),
    "multimodal/idefics3": Rule(("core", "multimodal"), torch("model")),
    "multimodal/smolvlm": Rule(("core", "multimodal")),
    "multimodal/mistral3": Rule(("core", "multimodal")),
    "multimodal/pixtral": Rule(("core", "multimodal"), torch("model")),
    "multimodal/internvl": Rule(("core", "multimodal"), torch("model")),
    "multimodal/llava": Rule(("core", "multimodal"), torch("model")),
    "multimodal/llava_next": Rule(("core", "multimodal"), torch("model")),
    "multimodal/mllama": Rule(("core", "multimodal"), torch("model")),
    "multimodal/mllama_tower": Rule(("core", "multimodal"), torch("model")),
    "multimodal/phi3_v": Rule(("core", "core/families", "multimodal"), torch("model")),
    "multimodal/deepstack": Rule(("core", "multimodal"), torch("deepstack_tower")),
    "multimodal/pixtral_tower": Rule(("core", "multimodal"), torch("model")),
    "multimodal/vit": Rule(("core", "multimodal"), torch("model", "vit_block")),
    "multimodal/gemma3": Rule(("core", "core/families", "multimodal"), torch("model")),
    "multimodal/qwen2_vl": Rule(("core", "multimodal"), torch("model", "vision_tower")),
    "multimodal/qwen2_5_vl": Rule(("core", "multimodal"), torch("model")),
    "multimodal/qwen3_vl": Rule(("core", "core/families", "multimodal"), torch("model")),
    "server": Rule(("core", "server/cli", "server/tenants")),
    "server/tenants": Rule(("core",)),
    "server/text": Rule(("core",)),
    "server/protocol": Rule(("core",)),
    "server/protocol/pooling": Rule(("core", "server/pooling", "server/protocol")),
    "server/config": Rule(("core", "server/config/vllm_flags")),
    "server/config/vllm_flags": Rule(("core", "server/config")),
    "server/engine": Rule(("core",)),
    "server/engine/on_ray": Rule(("core", "core/executor/on_ray", "server/engine")),
    "server/fleet": Rule(("core", "server/engine", "server/engine/on_ray", "server/routing")),
    "server/routing": Rule(()),
    "server/front": Rule(("core", "multimodal", "server")),
    "server/reasoning": Rule(("core", "server/text")),
    "server/grammars": Rule(("core", "multimodal/decode_workers", "server/text")),
    "server/tools": Rule(("core", "server/grammars", "server/protocol", "server/text")),
    "server/prompts": Rule(
        (
            "core",
            "multimodal",
            "server/engine",
            "server/grammars",
            "server/protocol",
            "server/reasoning",
            "server/text",
            "server/tools",
        )
    ),
    "server/dialects": Rule(("core", "server/prompts", "server/protocol", "server/reasoning", "server/text")),
    "server/pooling": Rule(("core", "multimodal", "server/prompts")),
    "server/metrics": Rule(("core", "server", "server/engine", "server/prompts")),
    "server/plan": Rule(("core", "multimodal", "assets", "server/config")),
    "server/page": Rule(()),
    "server/records": Rule(("core", "server/metrics", "server/prompts", "server/text")),
    "server/routes": Rule(("core", "multimodal", "server")),
    "server/routes/dialects": Rule(("core", "server")),
    "server/routes/streams": Rule(("core", "server")),
    "server/routes/vllm": Rule(("core", "multimodal", "server")),
    "server/routes/pooling": Rule(("core", "multimodal", "server")),
    "server/http": Rule(("core", "multimodal", "server")),
    "server/batch": Rule(("core", "server")),
    "server/bench": Rule(("core", "server")),
    "server/bench/alone": Rule(("core", "assets", "server", "trencadis")),
    "server/cli/api": Rule(("core", "server")),
    "server/cli": Rule(("core", "assets", "server", "trencadis")),
    "trencadis": Rule(("core", "multimodal", "server", "assets")),
    "trencadis/ray_serve": Rule(("core", "server")),
}
"""Imports go server -> multimodal -> core <- backends."""


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

    visit(ast.parse(path.read_text(encoding="utf-8")), False, False)
    return tuple(found)


@cache
def imports(path: Path, lazy: bool = False, typing: bool = False) -> frozenset[str]:
    """Modules that ``path`` imports at import time (and, if asked, inside functions or for type checkers only)."""
    requested = (names for names, inside, checked in imported(path) if lazy >= inside and typing >= checked)
    return frozenset().union(*requested)


def test_every_package_has_a_rule() -> None:
    assert {package_of(p) for p in FILES.values()} == set(RULES)
    for package, rule in RULES.items():
        stems = {p.stem for p in FILES.values() if package_of(p) == package}
        assert rule.torch == EVERY or rule.torch <= stems, f"{package}: the rule names a module that is gone"


def allowed(package: str, target: str) -> bool:
    """Whether a module of ``package`` may import one of ``target``: itself, what lies below it, what its rule names."""
    within = (package, *RULES[package].imports)
    return any(target == other.removesuffix("/.") or target.startswith(other + "/") for other in within)


def modules(package: str) -> list[str]:
    return sorted(name for name, path in FILES.items() if package_of(path) == package)


@pytest.mark.parametrize("package", sorted(RULES))
def test_arrows(package: str) -> None:
    for name in modules(package):
        for imported in imports(FILES[name], lazy=True, typing=True):
            assert imported.split(".")[0] not in {"core", "backends", "multimodal", "server", "assets"}, imported
            if imported in FILES and imported != "trencadis":
                assert allowed(package, package_of(FILES[imported])), f"{name} imports {imported}"


def test_backends_do_not_see_each_other() -> None:
    for name, path in FILES.items():
        for own, other in (("cuda", "hpu"), ("hpu", "cuda"), ("cpu", "cuda"), ("cpu", "hpu")):
            if name.startswith(f"trencadis.backends.{own}"):
                assert not any(i.startswith(f"trencadis.backends.{other}") for i in imports(path, lazy=True))


NAMES_DEVICES = {
    "core/devices.py", "core/envs.py", "core/config.py", "server/plan/plan_command.py", "server/cli/main.py",
    "server/cli/collect_env.py",
    "server/config/vllm_flags/engine_flags.py", "server/config/vllm_flags/parallel_flags.py",
    "server/config/vllm_flags/env_variables.py",
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


@pytest.mark.parametrize("package", sorted(RULES))
def test_torch_free_half(package: str) -> None:
    """Every module that its package's rule does not name, and the policies of each device."""
    rule = RULES[package].torch
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
        "trencadis.backends.conformance.family.transformers_oracle",
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
