"""Annotations that the repository leaves out, added to what mypy reads: types of fixtures, and what a first build saw."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tools.renaming.project import File, Project, Symbol, module_of
from tools.renaming.scopes import FunctionNode

WRAPPERS = ("Iterator", "Generator", "AsyncIterator", "AsyncGenerator", "Iterable")


@dataclass
class Hints:
    """Annotations as text, in which ``_M_a_db`` is module ``a.b``; of a generator's values where it is a fixture."""

    returns: dict[Symbol, str] = field(default_factory=dict)
    params: dict[tuple[Symbol, str], str] = field(default_factory=dict)


def alias(module: str) -> str:
    return "_M_" + module.replace("_", "_u").replace(".", "_d")


def _module(name: str) -> str:
    return name.removeprefix("_M_").replace("_d", ".").replace("_u", "_")


class Typist:
    """Writes the hints into the text of files, so that no line moves; columns do only in lines of definitions."""

    def __init__(self, project: Project, hints: Hints) -> None:
        self.project, self.hints = project, hints
        self.fixtures: dict[str, list[Symbol]] = {}
        for path, file in project.files.items():
            for name, scope in file.nodes.items():
                if scope.kind == "function" and is_fixture(scope.node):
                    self.fixtures.setdefault(_fixture_name(scope.node), []).append(Symbol(path, name))

    def text(self, file: File) -> str:
        """The text for mypy."""
        edits: dict[tuple[int, int], str] = {}
        for node in ast.walk(file.source.tree):
            if isinstance(node, ast.AnnAssign):
                self._variable(file, node, edits)
        for name, scope in file.nodes.items():
            if scope.kind == "function":
                self._function(file, Symbol(file.path, name), scope.node, edits)  # type: ignore[arg-type]
        parts, at, data = [], 0, file.source.data
        for (start, end), new in sorted(edits.items()):
            if start < at:
                continue
            parts += [data[at:start], new.encode()]
            at = end
        text = b"".join([*parts, data[at:]]).decode()
        modules = sorted({m.group() for new in edits.values() for m in re.finditer(r"\b_M_\w+(?=\.)", new)})
        return text + "".join(f"\nimport {_module(m)} as {m}" for m in modules) + "\n"

    def _variable(self, file: File, node: ast.AnnAssign, edits: dict[tuple[int, int], str]) -> None:
        """``x: Any = y.z`` says less than ``x = y.z``."""
        scope = file.scopes.around[id(node)]
        kinds = (ast.Call, ast.Attribute, ast.Name, ast.Subscript, ast.Await)
        if scope.kind == "class" or not _is_any(node.annotation) or not isinstance(node.value, kinds):
            return
        if not isinstance(node.target, ast.Name):
            return
        start, end = file.source.span(node.target)[1], file.source.span(node.annotation)[1]
        if b"\n" not in file.source.data[start:end]:
            edits[start, end] = " " * (end - start)

    def _function(self, file: File, symbol: Symbol, node: FunctionNode, edits: dict[tuple[int, int], str]) -> None:
        takes_fixtures = is_fixture(node) or node.name.startswith("test")
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if arg.arg in ("self", "cls") or (arg.annotation is not None and not _is_any(arg.annotation)):
                continue
            hint = self._fixture(file, arg.arg) if takes_fixtures else None
            hint = hint or self.hints.params.get((symbol, arg.arg))
            if hint is None:
                continue
            start, end = file.source.span(arg)
            name_end = start + len(arg.arg.encode())
            edits[(name_end, end)] = f': "{hint}"'
        found = self.hints.returns.get(symbol)
        if found is not None and not is_fixture(node) and not isinstance(node, ast.AsyncFunctionDef):
            if node.returns is None:
                at = self._colon(file, node)
                edits[at, at] = f' -> "{found}"'
            elif _is_any(node.returns):
                edits[file.source.span(node.returns)] = f'"{found}"'

    def _colon(self, file: File, node: FunctionNode) -> int:
        """Where a function's header ends."""
        data = file.source.data
        at = data.index(b"(", file.source.span(node)[0])
        depth = 0
        while True:
            char = data[at : at + 1]
            if char in b"([{":
                depth += 1
            elif char in b")]}":
                depth -= 1
            elif char == b":" and not depth:
                return at
            at += 1

    def _fixture(self, file: File, name: str) -> str | None:
        """The type of what a fixture gives, of the nearest one that a file sees."""
        found: Symbol | None = None
        for symbol in self.fixtures.get(name, []):
            folder = f"{PurePosixPath(symbol.path).parent}/"
            local = symbol.path == file.path
            shared = symbol.path.endswith("conftest.py") and file.path.startswith(folder)
            imported = name in file.scopes.top.bindings and not local
            if (local or shared or imported) and (found is None or local or len(symbol.path) > len(found.path)):
                if found is None or found.path != file.path:
                    found = symbol
        return self.value(found) if found is not None else None

    def value(self, fixture: Symbol) -> str | None:
        """The type of a fixture's value, by its annotation or by what it was seen to return."""
        file = self.project.files[fixture.path]
        returns = file.nodes[fixture.name].node.returns  # type: ignore[attr-defined]
        if returns is None or "Any" in ast.dump(returns):
            return self.hints.returns.get(fixture)
        if isinstance(returns, ast.Subscript) and getattr(returns.value, "id", "") in WRAPPERS:
            returns = returns.slice.elts[0] if isinstance(returns.slice, ast.Tuple) else returns.slice
        if "Any" in ast.dump(returns):
            return self.hints.returns.get(fixture)
        text = ast.unparse(returns)
        prefix = alias(module_of(fixture.path))
        known = file.scopes.top.bindings
        return re.sub(
            r"(?<![\w.\"'])([A-Za-z_]\w*)", lambda m: f"{prefix}.{m[1]}" if m[1] in known else m[1], text
        ).replace('"', "'")


def is_fixture(node: ast.AST) -> bool:
    """Whether a function is decorated by pytest's fixture."""
    for decorator in getattr(node, "decorator_list", []):
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        if getattr(callee, "attr", getattr(callee, "id", "")) == "fixture":
            return True
    return False


def _fixture_name(node: ast.AST) -> str:
    for decorator in getattr(node, "decorator_list", []):
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return str(getattr(node, "name", ""))


def _is_any(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) == "Any"
