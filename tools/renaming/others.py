"""Files that are not Python, and tables that name files or packages in a form of their own."""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath

from tools.renaming.guesses import Edits
from tools.renaming.names import Names
from tools.renaming.project import File, module_of
from tools.renaming.texts import Texts

COMMENTED = (".toml", ".yml", ".yaml", ".sh", ".cfg", ".service")
C = (".c", ".h", ".inc")
RULES = "tests/test_layers.py"


def collect_others(names: Names, texts: Texts, c_names: dict[str, str], out: Edits) -> None:
    """Adds the changes of all files but Python's, and of tables in Python that hold parts of paths."""
    project = names.project
    for path in project.names:
        if path in project.files or path.startswith("tools/renaming/") or path == "tests/tools/test_rename.py":
            continue
        try:
            text = (project.root / path).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        collect_text(path, text, texts, c_names, out)
    if RULES in project.files:
        _layer_rules(project.files[RULES], texts, out)
    if "setup.py" in project.files:
        _setup(project.files["setup.py"], texts, out)
    for path, file in project.files.items():
        if c_names:
            _c_lookups(path, file, names, c_names, out)


def collect_text(path: str, text: str, texts: Texts, c_names: dict[str, str], out: Edits) -> None:
    """Adds the changes of one file."""
    suffix = PurePosixPath(path).suffix
    for start, end, prose in _parts(path, suffix, text):
        for change in texts.changes(path, text[start:end], prose):
            _put(path, text, start + change.start, start + change.end, change.new, out)
    if suffix in C:
        for m in re.finditer(r"[A-Za-z_]\w*", text) if c_names else ():
            if m.group() in c_names:
                _put(path, text, *m.span(), c_names[m.group()], out)
        for m in re.finditer(r'#include "([\w.]+)"', text):
            new = texts.moves.get(str(PurePosixPath(path).parent / m[1]))
            if new is not None:
                _put(path, text, *m.span(1), PurePosixPath(new).name, out)


def _put(path: str, text: str, start: int, end: int, new: str, out: Edits) -> None:
    a = len(text[:start].encode())
    at = (a, a + len(text[start:end].encode()))
    if text[start:end] != new and not any(x < at[1] and at[0] < y for x, y in out.by_file.get(path, {})):
        out.put(path, at, new)


def _parts(path: str, suffix: str, text: str) -> list[tuple[int, int, bool]]:
    """The parts of a text, and whether each is prose."""
    if suffix == ".md":
        found, at = [], 0
        for fence in re.finditer(r"(?ms)^[ ]*```.*?^[ ]*```[ ]*$", text):
            found += [(at, fence.start(), True), (*fence.span(), False)]
            at = fence.end()
        return [*found, (at, len(text), True)]
    pattern = None
    if suffix in COMMENTED or PurePosixPath(path).name in ("Makefile", "Dockerfile"):
        pattern = r"(?m)(?:^|(?<=\s))#[^\n]*(?:\n[ \t]*#[^\n]*)*"
    elif suffix in C:
        pattern = r"//[^\n]*(?:\n[ \t]*//[^\n]*)*|(?s:/\*.*?\*/)"
    if pattern is None:
        return [(0, len(text), False)]
    found, at = [], 0
    for comment in re.finditer(pattern, text):
        found += [(at, comment.start(), False), (*comment.span(), True)]
        at = comment.end()
    return [*found, (at, len(text), False)]


def _layer_rules(file: File, texts: Texts, out: Edits) -> None:
    """``torch("stem")`` of a folder's rule names files of that folder without their suffix."""
    for node in ast.walk(file.source.tree):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            folder = key.value if isinstance(key, ast.Constant) else None
            for call in ast.walk(value):
                if isinstance(folder, str) and isinstance(call, ast.Call) and getattr(call.func, "id", "") == "torch":
                    for stem in call.args:
                        _stem(file, stem, folder, ".py", texts, out)


def _stem(file: File, node: ast.expr, folder: str, suffix: str, texts: Texts, out: Edits) -> None:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return
    old = f"{folder}/{node.value}{suffix}"
    new = texts.moves.get(old)
    if new is None:
        return
    if PurePosixPath(new).parent != PurePosixPath(texts.path(folder, False) or folder):
        out.undecided.append(f"{file.path}:{node.lineno}: {old} moves to another folder, whose rule must name it")
    start, end = file.source.span(node)
    stem = new.rpartition("/")[2].removesuffix(suffix)
    if stem != node.value:
        out.put(file.path, (start + 1, end - 1), stem)


def _setup(file: File, texts: Texts, out: Edits) -> None:
    """setup.py lists C sources by their stems, one tuple a suffix."""
    folder = next((m[1] for m in re.finditer(r'FOLDER = "([\w/]+)"', file.source.data.decode())), "")
    for node in ast.walk(file.source.tree):
        if not isinstance(node, ast.GeneratorExp | ast.ListComp) or not isinstance(node.elt, ast.JoinedStr):
            continue
        last, listed = node.elt.values[-1], node.generators[0].iter
        if isinstance(last, ast.Constant) and isinstance(listed, ast.Tuple):
            for stem in listed.elts:
                _stem(file, stem, folder, str(last.value), texts, out)


def _c_lookups(path: str, file: File, names: Names, c_names: dict[str, str], out: Edits) -> None:
    """``library.name`` of a library that ctypes loaded, and the name in a string."""
    if not path.startswith(("backends/cpu/", "tests/", "benchmarks/")):
        return
    if b"ctypes" not in file.source.data and b"backends.cpu.native" not in file.source.data:
        return
    for node in ast.walk(file.source.tree):
        if isinstance(node, ast.Attribute) and node.attr in c_names:
            start, end = file.source.span(node)
            at = (end - len(node.attr), end)
            spot = (node.end_lineno or 0, node.end_col_offset or 0, node.attr)
            known = names.groups.index.members.get(path, {}).get(spot) is not None
            if at not in out.by_file.get(path, {}) and not known:
                out.put(path, at, c_names[node.attr])
        elif isinstance(node, ast.Constant) and node.value in c_names:
            start, end = file.source.span(node)
            if (start + 1, end - 1) not in out.by_file.get(path, {}):
                out.put(path, (start + 1, end - 1), c_names[node.value])


def package_list(text: str, names: list[str], renamed: dict[str, str]) -> str:
    """pyproject.toml's packages: new folders are added behind their parents, folders that are gone are left out."""
    held = re.search(r"(?ms)^packages = \[\n(.*?)^\]", text)
    if held is None:
        return text
    moved = [renamed.get(n, n) for n in names]
    wanted = {module_of(f"{PurePosixPath(n).parent}/__init__.py") for n in moved if n.endswith(".py") and "/" in n}
    lines = [line for line in held[1].splitlines() if line.strip(' ",') in wanted or not line.strip().startswith('"')]
    listed = [line.strip(' ",') for line in lines]
    before = re.findall(r'"([\w.]+)"', held[1])
    known = {module_of(f"{PurePosixPath(n).parent}/__init__.py") for n in names if n.endswith(".py") and "/" in n}
    for new in sorted(w for w in wanted - known if w.split(".")[0] in {p.split(".")[0] for p in before}):
        if new not in listed:
            above = new.rpartition(".")[0]
            at = max(
                (i for i, one in enumerate(listed) if one == above or one.startswith(f"{above}.")),
                default=len(lines) - 1,
            )
            lines.insert(at + 1, f'    "{new}",')
            listed.insert(at + 1, new)
    lines = list(dict.fromkeys(lines))
    return text if listed == before else text[: held.start(1)] + "\n".join(lines) + "\n" + text[held.end(1) :]
