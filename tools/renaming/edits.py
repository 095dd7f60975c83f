"""Finds every place in Python code that a plan changes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

from tools.renaming.guesses import Doubts, Edits, Guesses
from tools.renaming.hints import parametrize_names
from tools.renaming.index import Index
from tools.renaming.names import Names, captured, doubled_members
from tools.renaming.project import Project, Symbol, module_of
from tools.renaming.scopes import Imported

CALLS_WITH_NAMES = ("getattr", "setattr", "hasattr", "delattr", "object")
DOUBLES = ("SimpleNamespace", "Mock", "MagicMock")
STRING_TABLES = ("__all__", "__slots__", "__match_args__")


class FileEdits(Doubts):
    """The edits of one file."""

    def collect(self) -> None:
        for scope in self.file.scopes.top.walk():
            for binding in scope.bindings.values():
                new = self.names.final(self.file, binding)
                if new != binding.name:
                    for spot in binding.spots:
                        self.put(spot, new)
        for node in self.nodes():
            visit = getattr(self, f"on_{type(node).__name__}", None)
            if visit is not None:
                visit(node)

    def nodes(self) -> Iterator[ast.AST]:
        yield from ast.walk(self.source.tree)
        for _, tree in list(self.source.parsed):
            yield from ast.walk(tree)

    # imports

    def on_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            new = self.names.module(alias.name)
            if new != alias.name:
                start, _ = self.source.span(alias)
                self.put((start, start + len(alias.name.encode())), new)

    def on_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        if node.level:
            if self.path in self.plan.moves and not self.path.startswith("examples/"):
                self.out.problems.append(
                    f"{self.where(self.source.span(node)[0])}: a relative import of a file that moves"
                )
            return
        news = [self.names.imported(self.file, Imported(module, a.name, a, node)) for a in node.names]
        modules = {m for m, _ in news}
        if len(modules) > 1:
            self._split(node, news)
            return
        new_module = min(modules)
        if new_module != module:
            start, _ = self.source.span(node)
            at = re.compile(rb"from\s+").match(self.source.data, start)
            assert at is not None
            self.put((at.end(), at.end() + len(module.encode())), new_module)
        for alias, (_, name) in zip(node.names, news, strict=True):
            if name != alias.name:
                start, _ = self.source.span(alias)
                self.put((start, start + len(alias.name.encode())), name)
            self._check_alias(alias, name)

    def _split(self, node: ast.ImportFrom, news: list[tuple[str, str]]) -> None:
        """Writes an import anew as one for each module that its names now lie in."""
        start, end = self.source.span(node)
        line_end = self.source.data.find(b"\n", end)
        comment = self.source.text(end, line_end if line_end >= 0 else len(self.source.data))
        if b"#" in self.source.data[start:end]:
            self.out.undecided.append(f"{self.where(start)}: comments inside an import that is split go")
        groups: dict[str, list[str]] = defaultdict(list)
        for alias, (module, name) in zip(node.names, news, strict=True):
            binding = self.file.scopes.meant[id(alias)]
            local = self.names.final(self.file, binding)
            self._check_alias(alias, name)
            groups[module].append(name if local == name else f"{name} as {local}")
        first = self.source.starts[self.source.line(start) - 1]
        indent = self.source.text(first, start)
        lines = [f"from {m} import {', '.join(n)}" for m, n in groups.items()]
        if comment.strip().startswith("#"):
            lines = [f"{text}  {comment.strip()}" for text in lines[:-1]] + lines[-1:]
        if indent.strip():
            self.out.problems.append(f"{self.where(start)}: an import that must be split shares its line")
        for spot in list(self.out.by_file[self.path]):
            if start <= spot[0] < end:
                del self.out.by_file[self.path][spot]
        self.put((start, end), f"\n{indent}".join(lines))

    def _check_alias(self, alias: ast.alias, name: str) -> None:
        binding = self.file.scopes.meant.get(id(alias))
        if alias.asname is None and binding is not None and self.names.final(self.file, binding) != name:
            local = self.names.final(self.file, binding)
            self.out.problems.append(
                f"{self.where(self.source.span(alias)[0])}: {alias.name} becomes {name}, but its uses {local}"
            )

    # attributes and keywords

    def on_Attribute(self, node: ast.Attribute) -> None:
        if id(node) in self.whole or self._module(node):
            return
        _, end = self.source.span(node)
        at = (end - len(node.attr.encode()), end)
        new = self.attribute(node)
        if new is not None:
            self.put(at, new)
        elif self.names.guess(node.attr) != node.attr and not self.foreign(node.value):
            guess = self.guess(node.value, node.attr)
            if guess is None:
                self.doubt(at[0], node.attr, f".{node.attr}")
            else:
                self.put(at, guess)

    def _module(self, node: ast.Attribute) -> bool:
        """Writes the name of a module that moves to another package anew, as a whole."""
        symbol = self.project.resolve(self.file, node)
        if symbol is None or symbol.name or symbol.path.endswith("/"):
            return False
        old, (start, end) = module_of(symbol.path), self.source.span(node)
        new, above = self.names.module(old), old.rpartition(".")[0]
        if self.names.module(above) == new.rpartition(".")[0]:
            return False
        if self.source.text(start, end) != old:
            self.out.problems.append(f"{self.where(start)}: {old} moves to another package")
            return True
        self.whole |= {id(n) for n in ast.walk(node)}
        self.put((start, end), new)
        return True

    def attribute(self, node: ast.Attribute) -> str | None:
        """The new name of an attribute; None where its object is unknown."""
        above = self.project.resolve(self.file, node.value)
        if above is not None and not above.name:
            path = above.path
            top = self.project.files[path].scopes.top if path in self.project.files else None
            if top is not None and node.attr in top.bindings:
                return self.names.final(self.project.files[path], top.bindings[node.attr])
            child = self.project.child(above, node.attr)
            return self.names.of_symbol(child) if child is not None else None
        if above is not None and self.names.is_class(above):
            found = self.names.member(above, node.attr)
            if found is not None:
                return found
        spot = (node.end_lineno or 0, node.end_col_offset or 0, node.attr)
        return self.slots(self.index.members.get(self.path, {}).get(spot), node.attr, self.source.span(node)[0])

    def on_Call(self, node: ast.Call) -> None:
        callee = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        for holder, text in pairwise(node.args):
            named = callee in CALLS_WITH_NAMES and holder is node.args[0]
            if named or isinstance(holder, ast.Name | ast.Attribute):
                self.pair(holder, text, named)
        changed = [k for k in node.keywords if k.arg is not None and (k.arg in self._params or k.arg in self._fields)]
        if not changed:
            return
        callees = self.callees(node)
        for keyword in changed:
            assert keyword.arg is not None
            start, _ = self.source.span(keyword)
            news = {n for n in (self.parameter(c, keyword.arg) for c in callees) if n is not None}
            if len(news) > 1:
                self.out.problems.append(f"{self.where(start)}: keyword {keyword.arg} becomes {sorted(news)}")
            elif news:
                pass
            elif callee in DOUBLES or (not self.foreign(node.func) and all(self.takes_more(c) for c in callees)):
                guess = self.keyword(node, keyword.arg, callee)
                if guess is None:
                    self.doubt(start, keyword.arg, f"{keyword.arg}=")
                news = {guess or keyword.arg}
            for new in news:
                self.put((start, start + len(keyword.arg.encode())), new)

    def takes_more(self, symbol: Symbol) -> bool:
        """Whether a function or a class may take keywords that it does not name."""
        scope = self.project.scope(symbol)
        if scope is not None and scope.kind == "class":
            facts = self.index.classes.get(symbol)
            inits = [Symbol(b.path, f"{b.name}.__init__") for b in facts.order] if facts is not None else []
            scope = next((s for s in map(self.project.scope, inits) if s is not None), None)
        args = getattr(scope.node if scope is not None else None, "args", None)
        return args is not None and args.kwarg is not None

    def keyword(self, node: ast.Call, name: str, callee: str) -> str | None:
        """The new name of a keyword that no known parameter takes, as one that is handed on; None: undecided."""
        said = self.guesses.said(self.path, node.func, name)
        if said is not None:
            return said
        if name in self._params or name not in self._fields:
            return None
        guess = self.names.guess(name)
        return guess if guess == name or callee in DOUBLES else None

    @cached_property
    def _params(self) -> set[str]:
        return {param for _, param in self.plan.params}

    @cached_property
    def _fields(self) -> set[str]:
        return {slot.name for slot in self.plan.slots}

    def callees(self, node: ast.Call) -> list[Symbol]:
        """Functions and classes of this project that a call may call."""
        found: list[Symbol] = []
        symbol = self.project.resolve(self.file, node.func)
        if symbol is not None and self.project.scope(symbol) is not None:
            found.append(symbol)
        elif isinstance(node.func, ast.Attribute):
            spot = (node.func.end_lineno or 0, node.func.end_col_offset or 0, node.func.attr)
            for slot in self.index.members.get(self.path, {}).get(spot) or ():
                one = Symbol(slot.owner.path, f"{slot.owner.name}.{slot.name}")
                if slot.owner.path and self.project.scope(one) is not None:
                    found.append(one)
        if not found:
            spot2 = (node.func.end_lineno or 0, node.func.end_col_offset or 0)
            found += self.index.callees.get(self.path, {}).get(spot2, ())
        return found

    def parameter(self, symbol: Symbol, name: str) -> str | None:
        """The new name of a keyword of a function or class; None where it has no such parameter."""
        scope = self.project.scope(symbol)
        if scope is not None and scope.kind == "function":
            binding = scope.bindings.get(name)
            return self.plan.params.get((symbol, name), name) if binding and "param" in binding.kinds else None
        facts = self.index.classes.get(symbol)
        if facts is None:
            return None
        if facts.synthesized:
            return self.names.member(symbol, name)
        for base in facts.order:
            for made in ("__init__", "__new__"):
                if self.project.scope(Symbol(base.path, f"{base.name}.{made}")) is not None:
                    return self.parameter(Symbol(base.path, f"{base.name}.{made}"), name)
        return None

    def on_Tuple(self, node: ast.Tuple | ast.List) -> None:
        """An object and a name of an attribute side by side, as in tables of what a test patches."""
        for holder, text in pairwise(node.elts):
            if isinstance(text, ast.Constant) and isinstance(holder, ast.Name | ast.Attribute):
                self.pair(holder, text, False)

    on_List = on_Tuple

    def on_JoinedStr(self, node: ast.JoinedStr) -> None:
        """``f"{PACKAGE}.module"``: the module behind a constant may be another one."""
        if len(node.values) != 2 or not isinstance(node.values[0], ast.FormattedValue):
            return
        tail, old = node.values[1], self.project.text(self.file, node)
        above = self.project.text(self.file, node.values[0].value)
        if not isinstance(tail, ast.Constant) or old is None or above is None or old not in self.project.modules:
            return
        new, new_above = self.names.module(old), self.names.dotted(above)
        if new.startswith(f"{new_above}."):
            _, end = self.source.span(node)
            self.put((end - 1 - len(str(tail.value).encode()), end - 1), new[len(new_above) :])
        else:
            self.out.problems.append(f"{self.where(self.source.span(node)[0])}: {old} moves to {new}")

    def on_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and (new := self.guesses.said(self.path, None, f"'{node.value}'")) is not None:
            start, end = self.source.span(node)
            self.put((start + 1, end - 1), new)

    def on_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Names of parameters in the strings of a test's decorators."""
        scope = self.file.scopes.of_node[id(node)]
        for text, parameters in parametrize_names(node):
            start, end = self.source.span(text)
            for name in parameters:
                binding = scope.bindings.get(name)
                new = self.names.final(self.file, binding) if binding is not None else name
                at = self.source.word(start, name, end)
                if new != name and at is not None:
                    self.put(at, new)

    on_AsyncFunctionDef = on_FunctionDef

    def on_MatchClass(self, node: ast.MatchClass) -> None:
        symbol = self.project.resolve(self.file, node.cls)
        after = self.source.span(node.patterns[-1] if node.patterns else node.cls)[1]
        for name, pattern in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            at = self.source.word(after, name)
            assert at is not None
            new = self.names.member(symbol, name) if symbol is not None else None
            if new is not None:
                self.put(at, new)
            elif self.names.guess(name) != name:
                self.out.undecided.append(self.where(at[0]) + f"  [{name}=]")
            after = self.source.span(pattern)[1]

    def on_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id in STRING_TABLES:
                self._table(target, node.value)

    def on_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id in STRING_TABLES and node.value is not None:
            self._table(node.target, node.value)

    def _table(self, target: ast.Name, value: ast.expr) -> None:
        scope = self.file.scopes.around[id(target)]
        for node in ast.walk(value):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if target.id == "__all__":
                binding = scope.bindings.get(node.value)
                new = self.names.final(self.file, binding) if binding is not None else None
            else:
                new = self.names.member(Symbol(self.path, scope.qualname), node.value)
            start, end = self.source.span(node)
            if new is not None and self.source.text(start + 1, end - 1) == node.value:
                self.put((start + 1, end - 1), new)


def collect(project: Project, index: Index, names: Names, uses: dict[str, dict[str, str]]) -> Edits:
    """All edits of Python code; problems among them too."""
    out = Edits()
    guesses = Guesses(names, uses)
    for file in project.files.values():
        FileEdits(file, project, index, names, guesses, out).collect()
        out.problems += captured(file, names)
    out.problems += doubled_members(index, names)
    out.problems = list(dict.fromkeys(out.problems))
    out.undecided = list(dict.fromkeys(out.undecided))
    return out
