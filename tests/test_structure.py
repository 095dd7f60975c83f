"""The bounds that keep the house walkable: folders, files, functions, names; and every path that a text names."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.syntax import parse, statements

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("core", "backends", "multimodal", "server", "trencadis", "assets")
FILE, FUNCTION, KERNEL = 500, 60, 80
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
SOURCES = [f for f in TRACKED if f.endswith(".py") and (ROOT / f).is_file()]
MODULE = re.compile(r"\b(?:trencadis|benchmarks)(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(
    r"(?<![\w/.<>{}$*-])(?:core|backends|multimodal|server|trencadis|assets|benchmarks|tools|tests|examples|docs)"
    r"/[\w./-]*\.(?:py|md|sh|json|svg|png|csv|jinja)\b"
)
OWN_NAMES = (
    "trencadis.admission",
    "trencadis.answers",
    "trencadis.body",
    "trencadis.request_id",
    "trencadis.settings",
    "trencadis.metrics",
    "trencadis.tenant",
    "trencadis.record",
    "trencadis.turn",
    "trencadis.fair_queue",
    "trencadis.connection",
    "trencadis.buckets",
    "trencadis.outcome",
    "trencadis.tool_parsers",
    "trencadis.reasoning_parsers",
)
"""Keys of an ASGI scope and of a span, local variables of that name, and groups of entry points."""


def _dotted(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(("trencadis", *parts) if parts[0] in TOPS and parts[0] != "trencadis" else parts)


MODULES = {_dotted(f): f for f in SOURCES}
PREFIXES = {m.rsplit(".", i)[0] for m in MODULES for i in range(m.count(".") + 1)}


class Outline(NamedTuple):
    """A file's text, its classes (name, whether at its top), and its functions (name, first line, count of lines)."""

    text: str
    classes: tuple[tuple[str, bool], ...]
    functions: tuple[tuple[str, int, int], ...]


@cache
def outline(file: str) -> Outline:
    """Read and parsed once for all tests."""
    text = (ROOT / file).read_text(encoding="utf-8")
    tree = parse(ROOT / file)
    found = list(statements(tree))
    top = set(map(id, tree.body))
    functions = (n for n in found if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return Outline(
        text,
        tuple((n.name, id(n) in top) for n in found if isinstance(n, ast.ClassDef)),
        tuple((n.name, n.lineno, (n.end_lineno or n.lineno) - n.lineno + 1) for n in functions),
    )


def test_files_and_functions_are_short() -> None:
    long = []
    for file in SOURCES:
        found = outline(file)
        if found.text.count("\n") > FILE:
            long.append(f"{file}: {found.text.count(chr(10))} lines")
        most = KERNEL if file.startswith("backends/cuda/kernels/") else FUNCTION
        long += [f"{file}:{at} {name}: {lines} lines" for name, at, lines in found.functions if lines > most]
    assert long == []


def test_no_two_public_classes_share_a_name() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for file in SOURCES:
        if file.startswith(TOPS):
            for name, top in outline(file).classes:
                if top and not name.startswith("_"):
                    owners[name].append(file)
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}


ALONE = {
    "backends/cpu/": "torch's half of a module that the server reads",
    "backends/cuda/kernels/": "one kernel a file",
    "backends/cuda/attention_libraries/ops_with_attention_library.py": "imports the libraries, which need not be there",
    "backends/hpu/": "what a bridge, a launch or an emulator adds, each found by its name",
    "core/family_configs/": "near families a file",
    "multimodal/qwen2_vl/model.py": "keeps torch out of the API process",
}
"""Files, or folders, whose short files may have one importer -> why."""

SHORT = 60


def test_short_files_are_not_split_off_for_one_user() -> None:
    """A file of less than 60 lines with one importer belongs into it, unless there is a reason."""
    product = {name: file for name, file in MODULES.items() if file.startswith(TOPS[:-1])}
    users: dict[str, set[str]] = defaultdict(set)
    for name, file in product.items():
        for node in statements(parse(ROOT / file)):
            if isinstance(node, ast.ImportFrom):
                targets = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
                for target in targets & product.keys():
                    users[target].add(name)
    found = [
        file
        for name, file in product.items()
        if len(users[name]) == 1 and outline(file).text.count("\n") < SHORT
        if not file.endswith("__init__.py") and not file.startswith(tuple(ALONE))
    ]
    assert found == []


def _resolves(name: str) -> bool:
    """A module, a package, or a name that a module's text holds."""
    parts = name.split(".")
    end = next(i for i in range(len(parts), -1, -1) if i == 0 or ".".join(parts[:i]) in PREFIXES)
    found, rest = ".".join(parts[:end]), parts[end:]
    if not rest:
        return True
    return found in MODULES and bool(re.search(rf"\b{rest[0]}\b", outline(MODULES[found]).text))


OF_BEFORE = "tests/families/test_old_names.py"
"""A file that names modules of before."""


@pytest.mark.parametrize("suffix", [".py", ".md", ".toml", ".sh", "Makefile", ".yml"])
def test_every_module_and_file_that_a_text_names_exists(suffix: str) -> None:
    wrong = []
    for file in TRACKED:
        if not file.endswith(suffix) or not (ROOT / file).is_file() or file.startswith(OF_BEFORE):
            continue
        text = (ROOT / file).read_text(encoding="utf-8")
        names = {m.group(0) for m in MODULE.finditer(text)}
        wrong += [
            f"{file}: {n}"
            for n in sorted(names)
            if not n.startswith(OWN_NAMES) and not n.endswith(".md") and not _resolves(n)
        ]
        wrong += [f"{file}: {p}" for p in sorted({m.group(0) for m in PATH.finditer(text)}) if not (ROOT / p).exists()]
    assert wrong == []


OLD_NAMES = (
    "Where",
    "Turn",
    "Flight",
    "MediaDesk",
    "Books",
    "Draft",
    "BucketsAsked",
    "Asked",
    "Lane",
    "SAYINGS",
    "Process",
)
"""Names that nobody who knows this field would search for; the words in their place are in the docs."""
OLD_SENTENCES = (
    "Told what goes on", "choices that wait for blocks on their way back", "no more images come in meanwhile",
    "nobody gives up rows either", "are used by others", "whose needs cost least more elsewhere",
    "costs no place in the batch", "Biases of sums are rank 0's", "captured while their stage held none",
    "of what nobody has needed yet", "who asks again at once", "float32 where nobody says", "is no lane any more",
    "The line about a flag of `legacy`", "lacks or garbles",
)  # fmt: skip


def test_old_names_and_sentences_are_gone() -> None:
    found = []
    for file in SOURCES:
        if not file.startswith(TOPS):
            continue
        text = outline(file).text
        defined = {name for name, _ in outline(file).classes}
        found += [f"{file}: class {name}" for name in OLD_NAMES if name in defined]
        found += [f"{file}: {sentence}" for sentence in OLD_SENTENCES if sentence in " ".join(text.split())]
    assert found == []
