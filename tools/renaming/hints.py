"""Annotations that the repository leaves out, for mypy to read: types of fixtures, and what a first build saw."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

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
        text += "".join(f"\nimport {_module(m)} as {m}" for m in modules) + "\n"
        try:
            ast.parse(text)
        except SyntaxError:
            return data.decode()
        return text

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
            fixture = self.fixture(file, arg.arg) if takes_fixtures else None
            hint = self.value(fixture) if fixture is not None else None
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

    def fixture(self, file: File, name: str) -> Symbol | None:
        """The nearest fixture of a name that a file sees."""
        found: Symbol | None = None
        for symbol in self.fixtures.get(name, []):
            folder = f"{PurePosixPath(symbol.path).parent}/"
            local = symbol.path == file.path
            shared = symbol.path.endswith("conftest.py") and file.path.startswith(folder)
            imported = name in file.scopes.top.bindings and not local
            nearer = found is None or (found.path != file.path and (local or len(symbol.path) > len(found.path)))
            if (local or shared or imported) and nearer:
                found = symbol
        return found

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


def parametrized(node: ast.AST) -> set[str]:
    """Parameters that get their values by a decorator."""
    return {name for _, names in parametrize_names(node) for name in names}


def parametrize_names(node: ast.AST) -> list[tuple[ast.Constant, list[str]]]:
    """The strings that name a test's parameters in its decorators, and the names in each."""
    found = []
    for decorator in getattr(node, "decorator_list", []):
        callee = getattr(decorator, "func", None)
        kind = getattr(callee, "attr", "")
        if kind not in ("parametrize", "usefixtures"):
            continue
        first = decorator.args if kind == "usefixtures" else decorator.args[:1]
        for part in first:
            for one in part.elts if isinstance(part, ast.Tuple | ast.List) else [part]:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    found.append((one, re.findall(r"\w+", one.value)))
    return found


def _fixture_name(node: ast.AST) -> str:
    for decorator in getattr(node, "decorator_list", []):
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return str(getattr(node, "name", ""))


def _is_any(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) == "Any"


class Observer:
    """Reads one build; ``reader`` gives its nodes and names."""

    def __init__(self, reader: Any) -> None:
        self.reader, self.nodes, self.types = reader, reader.nodes, reader.types
        self.seen_returns: dict[Symbol, set[str]] = defaultdict(set)
        self.seen_params: dict[tuple[Symbol, str], set[str]] = defaultdict(set)

    def hints(self) -> Hints:
        """What all places agree about, but for None and Any."""
        project = self.reader.project
        for module in project.modules:
            tree = self.reader.result.files.get(module)
            for node in self.reader.walk(tree) if tree is not None else ():
                if isinstance(node, self.nodes.FuncDef):
                    self.function(node)
                elif isinstance(node, self.nodes.CallExpr):
                    self.call(node)
                elif isinstance(node, self.nodes.Decorator):
                    self.parametrized(node)
        return Hints(self._agreed(self.seen_returns), self._agreed(self.seen_params))

    def _agreed(self, seen: dict[Any, set[str]]) -> dict[Any, str]:
        found = {}
        for key, kinds in seen.items():
            some = sorted(kinds - {"None", "Any"})
            if 0 < len(some) <= 4:
                found[key] = " | ".join([*some, *(["None"] if "None" in kinds else [])])
        return found

    def text(self, kind: Any, depth: int = 0) -> str | None:
        """A type as an annotation."""
        t = self.types
        kind = t.get_proper_type(kind)
        if kind is None or depth > 3:
            return None
        if isinstance(kind, t.NoneType):
            return "None"
        if isinstance(kind, t.UnionType):
            parts = [self.text(i, depth + 1) for i in kind.items]
            return " | ".join(dict.fromkeys(p for p in parts if p)) if all(parts) else None
        if isinstance(kind, t.LiteralType):
            return self.text(kind.fallback, depth)
        if isinstance(kind, t.TupleType):
            if kind.partial_fallback.type.fullname != "builtins.tuple":
                return self.text(kind.partial_fallback, depth)
            return f"tuple[{', '.join(self.text(i, depth + 1) or 'object' for i in kind.items) or '()'}]"
        if isinstance(kind, t.CallableType):
            made = self.text(kind.ret_type, depth + 1)
            if kind.is_type_obj():
                return f"type[{made}]" if made else None
            return f"{alias('typing')}.Callable[..., {made}]" if made else None
        if isinstance(kind, t.Instance):
            return self.instance(kind, depth)
        return None

    def instance(self, kind: Any, depth: int) -> str | None:
        info = kind.type
        module, name = info.module_name, info.fullname[len(info.module_name) + 1 :]
        if (
            not re.fullmatch(r"\w+(?:\.\w+)*", name)
            or not info.fullname.startswith(module)
            or module not in self.reader.result.files
        ):
            return None
        head = name if module == "builtins" else f"{alias(module)}.{name}"
        if not kind.args:
            return head
        parts = [self.text(a, depth + 1) for a in kind.args]
        if any(p is None for p in parts):
            return head if module != "builtins" else f"{head}[{', '.join(p or 'object' for p in parts)}]"
        return f"{head}[{', '.join(p or '' for p in parts)}]"

    def function(self, node: Any) -> None:
        symbols = self.reader.function(node)
        if not symbols:
            return
        for one in self._own(node.body):
            given = getattr(one, "expr", None)
            if given is None:
                continue
            kind = self.reader.result.types.get(given)
            text = self.text(kind) if kind is not None else None
            if text is not None:
                self.seen_returns[symbols[0]].add(text)

    def _own(self, body: Any) -> Iterator[Any]:
        """Statements that return, and expressions that yield, of a function itself."""
        reader, todo = self.reader, [body]
        inner = (self.nodes.FuncDef, self.nodes.LambdaExpr, self.nodes.ClassDef)
        while todo:
            node = todo.pop()
            if isinstance(node, self.nodes.ReturnStmt | self.nodes.YieldExpr):
                yield node
            todo += [n for n in reader.children(node) if not isinstance(n, inner)]

    def call(self, node: Any) -> None:
        kind = self.reader.result.types.get(node.callee)
        kind = self.types.get_proper_type(kind) if kind is not None else None
        if not isinstance(kind, self.types.CallableType):
            return
        definition = kind.definition
        if isinstance(definition, self.nodes.Decorator):
            definition = definition.func
        if not isinstance(definition, self.nodes.FuncDef):
            return
        symbols = self.reader.function(definition)
        if not symbols:
            return
        names = list(definition.arg_names)[len(definition.arguments) - len(kind.arg_names) :]
        for i, (argument, how, name) in enumerate(zip(node.args, node.arg_kinds, node.arg_names, strict=True)):
            if how.is_star():
                return
            if name is None:
                name = names[i] if i < len(names) else None
            seen = self.reader.result.types.get(argument)
            text = self.text(seen) if seen is not None else None
            if name is not None:
                self.seen_params[symbols[0], name].add(text or "Any")

    def parametrized(self, node: Any) -> None:
        symbols = self.reader.function(node.func)
        for decorator in node.decorators if symbols else ():
            if not isinstance(decorator, self.nodes.CallExpr) or len(decorator.args) < 2:
                continue
            if getattr(decorator.callee, "name", "") != "parametrize":
                continue
            names = self._names(decorator.args[0])
            kind = self.reader.result.types.get(decorator.args[1])
            kind = self.types.get_proper_type(kind) if kind is not None else None
            if not isinstance(kind, self.types.Instance) or not kind.args:
                continue
            item = self.types.get_proper_type(kind.args[0])
            for i, name in enumerate(names):
                one = item
                if len(names) > 1:
                    if not isinstance(item, self.types.TupleType) or len(item.items) != len(names):
                        break
                    one = item.items[i]
                text = self.text(one)
                if text is not None and text != "object":
                    self.seen_params[symbols[0], name].add(text)

    def _names(self, node: Any) -> list[str]:
        if isinstance(node, self.nodes.StrExpr):
            return [n.strip() for n in node.value.split(",") if n.strip()]
        return [i.value for i in getattr(node, "items", ()) if isinstance(i, self.nodes.StrExpr)]
