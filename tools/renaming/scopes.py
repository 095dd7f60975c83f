"""The scopes of a file: what each name is bound to, by Python's own rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.renaming.source import Source

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Imported(NamedTuple):
    """What an import binds: a module, or a name of one."""

    module: str
    name: str | None
    alias: ast.alias
    statement: ast.Import | ast.ImportFrom


@dataclass(eq=False)
class Binding:
    """A name of a scope, and the places where it stands; ``kinds`` are those of its definitions."""

    scope: Scope
    name: str
    spots: list[tuple[int, int]] = field(default_factory=list)
    users: list[tuple[Scope, tuple[int, int]]] = field(default_factory=list)
    imports: list[Imported] = field(default_factory=list)
    nodes: list[ast.AST] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    values: list[ast.expr | None] = field(default_factory=list)
    """What is assigned to it; None: something unknown, as in a loop."""
    since: int | None = None
    """Where the name is first bound, in a class: above that, the class's body means an outer one."""


@dataclass(eq=False)
class Scope:
    """``kind``: module, class, function, lambda or comprehension."""

    kind: str
    name: str
    node: ast.AST
    parent: Scope | None
    bindings: dict[str, Binding] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    inner: list[Scope] = field(default_factory=list)

    @property
    def qualname(self) -> str:
        above = self.parent.qualname if self.parent is not None else ""
        if self.kind not in ("class", "function"):
            return above
        return f"{above}.{self.name}" if above else self.name

    def bind(self, name: str, kind: str, node: ast.AST | None = None) -> Binding:
        """The binding of a name, of the scope that ``global`` or ``nonlocal`` names where one does."""
        if name in self.outside:
            found = self.outer(name)
            if found is not None:
                found.kinds.add(kind)
                return found
        found = self.bindings.setdefault(name, Binding(self, name))
        found.kinds.add(kind)
        if node is not None:
            found.nodes.append(node)
        return found

    def outer(self, name: str) -> Binding | None:
        """What ``global`` or ``nonlocal`` means."""
        scope = self.parent
        while scope is not None:
            if self.outside.get(name) == "global":
                if scope.kind == "module":
                    return scope.bindings.setdefault(name, Binding(scope, name))
            elif scope.kind in ("function", "lambda") and name in scope.bindings:
                return scope.bindings[name]
            scope = scope.parent
        return None

    def find(self, name: str, at: int | None = None) -> Binding | None:
        """What a use of a name in this scope, at an offset, means; None: a builtin, or nothing known."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.outside and (found := scope.outer(name)) is not None:
                return found
            if name in scope.bindings and (scope is self or scope.kind != "class"):
                found = scope.bindings[name]
                above = at is not None and found.since is not None and at < found.since and self._outer(name)
                if not above:
                    return found
            scope = scope.parent
        return None

    def _outer(self, name: str) -> bool:
        """Whether a scope around a class has a name too."""
        return self.parent is not None and self.parent.find(name) is not None

    def walk(self) -> Iterator[Scope]:
        yield self
        for scope in self.inner:
            yield from scope.walk()


@dataclass
class Scopes:
    """All of a file: its module scope, the scope of each use and of each definition, and uses of unknown names."""

    top: Scope
    of_node: dict[int, Scope] = field(default_factory=dict)
    """The scope that a definition, a lambda or a comprehension opens."""
    around: dict[int, Scope] = field(default_factory=dict)
    """The scope in which a Name, an Attribute, a Call, a pattern or an import stands."""
    meant: dict[int, Binding] = field(default_factory=dict)
    unknown: list[tuple[Scope, str, tuple[int, int]]] = field(default_factory=list)
    uses: list[tuple[Scope, str, tuple[int, int], ast.AST]] = field(default_factory=list)


class _Walk(ast.NodeVisitor):
    def __init__(self, source: Source) -> None:
        self.source = source
        self.scope = Scope("module", "", source.tree, None)
        self.found = Scopes(self.scope)
        self.statement_end = 0
        self.assigned: dict[int, ast.expr] = {}

    def bound(
        self, name: str, kind: str, node: ast.AST, at: tuple[int, int] | None, owner: ast.AST | None = None
    ) -> None:
        scope = self.scope
        binding = scope.bind(name, kind, owner)
        if scope.kind == "class":
            end = self.source.span(node)[1] if kind in ("function", "class") else self.statement_end
            binding.since = end if binding.since is None else min(binding.since, end)
        if at is not None:
            self.found.uses.append((scope, name, at, node))
            self.found.meant[id(node)] = binding

    def inside(self, scope_kind: str, name: str, node: ast.AST) -> Scope:
        scope = Scope(scope_kind, name, node, self.scope)
        self.scope.inner.append(scope)
        self.found.of_node[id(node)] = scope
        return scope

    def visit(self, node: ast.AST) -> None:
        self.found.around[id(node)] = self.scope
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Import | ast.ImportFrom):
            self.statement_end = self.source.span(node)[1]
        elif isinstance(node, ast.stmt):
            self.statement_end = self.source.span(node)[0]
        super().visit(node)

    def annotation(self, node: ast.expr | None) -> None:
        """Visits an annotation; strings in it are expressions, but for those of Literal."""
        if node is None:
            return
        for inner in _annotation_strings(node):
            parsed = self.source.annotation(inner)
            if parsed is not None:
                self.visit(parsed)
        self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: FunctionNode) -> None:
        start, _ = self.source.span(node)
        at = self.source.word(self.source.word(start, "def")[1], node.name)  # type: ignore[index]
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.bound(node.name, "function", node, at, node)
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for arg in _arguments(node.args):
            self.annotation(arg.annotation)
        self.annotation(node.returns)
        scope = self.inside("function", node.name, node)
        self._body(scope, node.args, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        self._body(self.inside("lambda", "<lambda>", node), node.args, [node.body])

    def _body(self, scope: Scope, args: ast.arguments, body: list[ast.stmt] | list[ast.expr]) -> None:
        before, self.scope = self.scope, scope
        for arg in _arguments(args):
            start, _ = self.source.span(arg)
            self.bound(arg.arg, "param", arg, (start, start + len(arg.arg.encode())), arg)
        for statement in body:
            self.visit(statement)
        self.scope = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        start, _ = self.source.span(node)
        at = self.source.word(self.source.word(start, "class")[1], node.name)  # type: ignore[index]
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.bound(node.name, "class", node, at, node)
        before, self.scope = self.scope, self.inside("class", node.name, node)
        for statement in node.body:
            self.visit(statement)
        self.scope = before

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        before, self.scope = self.scope, self.inside("comprehension", "<comp>", node)
        for i, generator in enumerate(node.generators):
            self.visit(generator.target)
            if i:
                self.visit(generator.iter)
            for test in generator.ifs:
                self.visit(test)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.scope = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        before = self.scope
        while self.scope.kind == "comprehension" and self.scope.parent is not None:
            self.scope = self.scope.parent
        self.visit(node.target)
        self.scope = before

    def visit_Name(self, node: ast.Name) -> None:
        at = self.source.span(node)
        if isinstance(node.ctx, ast.Load):
            self.found.uses.append((self.scope, node.id, at, node))
        else:
            self.bound(node.id, "variable", node, at, node)
            self.found.meant[id(node)].values.append(self.assigned.get(id(node)))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.assigned |= {id(t): node.value for t in node.targets}
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assigned[id(node.target)] = node.value
        self.visit(node.target)
        self.annotation(node.annotation)
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in ("cast", "TypeVar", "NewType") and node.args:
            self.annotation(node.args[0 if name == "cast" else -1])
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        _start, _end = self.source.span(node)
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            a, b = self.source.span(alias)
            at = self.source.word(a, name, b) if alias.asname is None else (b - len(name.encode()), b)
            self.bound(name, "import", alias, at, alias)
            self.scope.bind(name, "import").imports.append(
                Imported(alias.name if alias.asname else name, None, alias, node)
            )
        self.found.around[id(node)] = self.scope

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            _a, b = self.source.span(alias)
            name = alias.asname or alias.name
            at = None if alias.asname is None else (b - len(name.encode()), b)
            self.bound(name, "import", alias, at, alias)
            binding = self.scope.bind(name, "import")
            binding.imports.append(Imported("." * node.level + (node.module or ""), alias.name, alias, node))

    def visit_Global(self, node: ast.Global) -> None:
        self._outside(node, "global")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._outside(node, "nonlocal")

    def _outside(self, node: ast.Global | ast.Nonlocal, kind: str) -> None:
        start, _ = self.source.span(node)
        for name in node.names:
            self.scope.outside[name] = kind
            at = self.source.word(start + len(kind), name)
            assert at is not None
            self.found.uses.append((self.scope, name, at, node))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            after = self.source.span(node.type)[1] if node.type is not None else self.source.span(node)[0]
            at = self.source.word(self.source.word(after, "as")[1], node.name)  # type: ignore[index]
            self.bound(node.name, "variable", node, at, node)
        for statement in node.body:
            self.visit(statement)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name is not None:
            _, end = self.source.span(node)
            self.bound(node.name, "variable", node, (end - len(node.name.encode()), end), node)

    visit_MatchStar = visit_MatchAs  # type: ignore[assignment]

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            after = self.source.span(node.patterns[-1])[1] if node.patterns else self.source.span(node)[0]
            self.bound(node.rest, "variable", node, self.source.word(after, node.rest), node)


def _arguments(args: ast.arguments) -> list[ast.arg]:
    more = [a for a in (args.vararg, args.kwarg) if a is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *more]


def _annotation_strings(node: ast.expr) -> Iterator[ast.Constant]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node
        return
    if isinstance(node, ast.Subscript) and getattr(node.value, "id", getattr(node.value, "attr", "")) == "Literal":
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _annotation_strings(child)


def scopes(source: Source) -> Scopes:
    """Finds all scopes of a file, and what each of its names means."""
    walk = _Walk(source)
    for statement in source.tree.body:
        walk.visit(statement)
    found = walk.found
    for scope, name, at, node in found.uses:
        bound = found.meant.get(id(node))
        binding = bound if isinstance(bound, Binding) and bound.scope is scope else scope.find(name, at[0])
        if binding is None:
            found.unknown.append((scope, name, at))
            continue
        found.meant[id(node)] = binding
        if at not in binding.spots:
            binding.spots.append(at)
            binding.users.append((scope, at))
    return found
