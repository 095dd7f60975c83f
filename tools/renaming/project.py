"""All Python files of a repository: which module each is, and what a name or a dotted name of it stands for."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tools.renaming.scopes import Binding, Scope, Scopes, scopes
from tools.renaming.source import Source, read

PACKAGES = ("core", "backends", "multimodal", "server", "assets")
OWN = ("tools/renaming/", "tests/tools/test_rename.py")
"""The tool itself is left alone: its maps and tests hold old names."""


class Symbol(NamedTuple):
    """A definition: its file, and its name with the classes and functions around it; empty: the module."""

    path: str
    name: str


@dataclass
class File:
    """A parsed file with its scopes and the classes and functions in it by qualified name."""

    source: Source
    scopes: Scopes
    nodes: dict[str, Scope] = field(default_factory=dict)
    class_lines: dict[int, str] = field(default_factory=dict)
    function_lines: dict[int, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.source.path

    def where(self, offset: int) -> str:
        """The file, the line and its text."""
        line = self.source.line(offset)
        end = self.source.data.find(b"\n", offset)
        start = self.source.starts[line - 1]
        return f"{self.path}:{line}: {self.source.text(start, end if end >= 0 else len(self.source.data)).strip()}"


def module_of(path: str) -> str:
    """``trencadis.core.backend`` of ``core/backend.py``."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if parts and parts[0] in PACKAGES:
        parts.insert(0, "trencadis")
    if parts and parts[0] == "examples":
        parts = parts[2:]
    return ".".join(parts)


def tracked(root: Path) -> list[str]:
    """Files that git knows and that are there."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    return [f for f in done.stdout.split("\0") if f and (root / f).is_file() and not (root / f).is_symlink()]


@dataclass
class Project:
    """``files`` by path, ``modules`` by dotted name."""

    root: Path
    names: list[str]
    files: dict[str, File] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)

    def resolve_import(self, importer: str, module: str, name: str | None) -> Symbol | None:
        """The definition that an import means, through modules that only hand it on; None: not of this project."""
        if module.startswith("."):
            base = module_of(importer).split(".")
            level = len(module) - len(module.lstrip("."))
            if not importer.endswith("__init__.py"):
                base = base[:-1]
            base = base[: len(base) - level + 1]
            module = ".".join([*base, *([module.lstrip(".")] if module.lstrip(".") else [])])
        path = self.modules.get(module)
        if name is None:
            return (
                Symbol(path, "") if path is not None else Symbol(f"{module}/", "") if module in self.packages else None
            )
        if path is not None and (found := self.lookup(path, name)) is not None:
            return found
        inner = f"{module}.{name}"
        if inner in self.modules:
            return Symbol(self.modules[inner], "")
        return Symbol(f"{inner}/", "") if inner in self.packages else None

    def lookup(self, path: str, name: str, seen: frozenset[Symbol] = frozenset()) -> Symbol | None:
        """The definition of a module's name."""
        binding = self.files[path].scopes.top.bindings.get(name)
        if binding is None or Symbol(path, name) in seen:
            return None
        return self.definition(self.files[path], binding, seen | {Symbol(path, name)})

    def definition(self, file: File, binding: Binding, seen: frozenset[Symbol] = frozenset()) -> Symbol | None:
        """What a binding stands for: itself, or what it imports."""
        if binding.imports and binding.kinds == {"import"}:
            one = binding.imports[0]
            module, name = one.module, one.name
            if name is not None and (path := self.modules.get(module)) is not None:
                found = self.lookup(path, name, seen)
                if found is not None:
                    return found
            return self.resolve_import(file.path, module, name)
        value = binding.values[0] if len(binding.values) == 1 and binding.kinds == {"variable"} else None
        if isinstance(value, ast.Call) and (imported := self.imported_name(file, value)) is not None:
            return self.resolve_import(file.path, imported, None)
        if binding.scope.kind in ("lambda", "comprehension"):
            return None
        above = binding.scope.qualname
        return Symbol(file.path, f"{above}.{binding.name}" if above else binding.name)

    def imported_name(self, file: File, node: ast.Call) -> str | None:
        """The module that a call of import_module names."""
        if getattr(node.func, "id", getattr(node.func, "attr", "")) != "import_module" or not node.args:
            return None
        return self.text(file, node.args[0])

    def text(self, file: File, node: ast.expr, depth: int = 0) -> str | None:
        """The value of a string, of a constant of a module, or of an f-string of such."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            parts = [self.text(file, v.value if isinstance(v, ast.FormattedValue) else v, depth) for v in node.values]
            return "".join(p or "" for p in parts) if all(p is not None for p in parts) else None
        symbol = self.resolve(file, node) if depth < 4 else None
        owner = self.files.get(symbol.path) if symbol is not None else None
        binding = owner.scopes.top.bindings.get(symbol.name) if owner is not None and symbol is not None else None
        if owner is None or binding is None or len(binding.values) != 1 or binding.values[0] is None:
            return None
        return self.text(owner, binding.values[0], depth + 1)

    def child(self, symbol: Symbol, name: str) -> Symbol | None:
        """A name of a module; None for anything else, and where there is no such name."""
        if symbol.name:
            return None
        if symbol.path.endswith("/"):
            return self.resolve_import("", symbol.path[:-1], name)
        return self.resolve_import("", module_of(symbol.path), name)

    def resolve(self, file: File, node: ast.expr) -> Symbol | None:
        """What a name, or a chain of names through modules, stands for."""
        if isinstance(node, ast.Name):
            binding = file.scopes.meant.get(id(node))
            return self.definition(file, binding) if binding is not None else None
        if isinstance(node, ast.Attribute):
            above = self.resolve(file, node.value)
            return self.child(above, node.attr) if above is not None else None
        return None

    def scope(self, symbol: Symbol) -> Scope | None:
        """The scope that a class or a function opens."""
        file = self.files.get(symbol.path)
        return file.nodes.get(symbol.name) if file is not None else None


def load(root: Path, names: list[str] | None = None) -> Project:
    """Reads all Python files of the repository at ``root`` but the tool's own."""
    names = tracked(root) if names is None else names
    project = Project(root, names)
    for path in names:
        if not path.endswith(".py") or path.startswith(OWN):
            continue
        source = read(path, (root / path).read_bytes())
        file = File(source, scopes(source))
        for scope in file.scopes.top.walk():
            if scope.kind not in ("class", "function"):
                continue
            file.nodes.setdefault(scope.qualname, scope)
            line = scope.node.lineno  # type: ignore[attr-defined]
            (file.class_lines if scope.kind == "class" else file.function_lines)[line] = scope.qualname
        project.files[path] = file
        module = module_of(path)
        project.modules.setdefault(module, path)
        parts = module.split(".")
        project.packages |= {".".join(parts[:i]) for i in range(1, len(parts))}
    return project
