"""Types that say something: few values of type ``Any``, and named results of three or more values."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("core", "backends", "multimodal", "server", "trencadis")

MOST_ANY = 794
"""Most uses of ``Any`` in the product. JSON has names in core/json_types.py, values of flags have one in
core/flag_options.py; for a value that is only passed on or checked, ``object`` says as much and is checked.
"""

FIXED_TUPLES = {
    "backends/cpu/attention_plan.py": {"plans"},
    "backends/cpu/batch_invariant.py": {"rope_store"},
    "backends/cpu/int8_linear.py": {"round_to_int8"},
    "backends/cpu/native/row_kernels.py": {"_lies"},
    "backends/cpu/native/panels.py": {"_arrange_columns"},
    "backends/cpu/ops.py": {"rope_store", "tile_mask"},
    "backends/cpu/reference_ops.py": {"rope_store"},
    "backends/cuda/ops.py": {"rope_store"},
    "backends/hpu/attention/window_attention.py": {"_ranges"},
    "backends/hpu/emulator/fused_kernels.py": {"parts", "sdpa_recomp_parts"},
    "backends/hpu/ops.py": {"rope_store"},
    "backends/hpu/start/bridge_loader.py": {"sdpa_parts"},
    "backends/hpu/start/kernel_probes.py": {"time_launch"},
    "backends/hpu/start/machine.py": {"point_release"},
    "core/device/backend.py": {"rope_store"},
    "core/launches/model_runner.py": {"_scores"},
    "core/scheduling/fair_order.py": {"key"},
    "server/prompts/text_service.py": {"read"},
}
"""Functions that return, or yield in a container, a fixed tuple of three or more values, by file; all others have a
NamedTuple, whose fields have names. ``rope_store`` is part of the interface of backends, those of plug-ins too.
"""


WORTH_PARSING = re.compile(r"\bAny\b|->[^:]*\btuple\[[^\]]*,[^\]]*,")
"""Text of a file that may break a rule of this module; parsing the others would take seconds."""


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Every node of each file of the product that may break a rule; read and parsed once."""
    files = (path for part in PARTS for path in sorted((ROOT / part).rglob("*.py")))
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in files}
    return {file: list(ast.walk(ast.parse(text))) for file, text in texts.items() if WORTH_PARSING.search(text)}


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
        if any(map(_is_fixed_tuple, ast.walk(node.returns))) and node.name not in FIXED_TUPLES.get(file, ())
    ]
    assert found == [], "return a NamedTuple"
