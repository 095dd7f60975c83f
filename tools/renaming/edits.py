"""Finds every place in Python code that a plan changes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from tools.renaming.guesses import Guesses, asked_of_objects, object_key
from tools.renaming.hints import parametrize_names
from tools.renaming.index import Index, Slot
from tools.renaming.names import Names, captured, doubled_members
from tools.renaming.plan import Plan
from tools.renaming.project import File, Project, Symbol, module_of
from tools.renaming.scopes import Imported

CALLS_WITH_NAMES = ("getattr", "setattr", "hasattr", "delattr", "object")
STRING_TABLES = ("__all__", "__slots__", "__match_args__")


@dataclass
class Edits:
    """Replacements by file and byte offsets, and uses that a human must decide."""

    by_file: dict[str, dict[tuple[int, int], str]] = field(default_factory=lambda: defaultdict(dict))
    problems: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    unlikely: list[str] = field(default_factory=list)
    """Undecided too, but hardly a name of this project."""

    def put(self, path: str, at: tuple[int, int], new: str) -> None:
        held = self.by_file[path].get(at)
        if held is not None and held != new:
            self.problems.append(f"{path}: bytes {at}: both {held} and {new}")
        self.by_file[path][at] = new


class FileEdits:
    """The edits of one file."""

    def __init__(self, file: File, project: Project, index: Index, names: Names, guesses: Guesses, out: Edits) -> None:
        self.file, self.source, self.guesses = file, file.source, guesses
        self.project, self.index, self.names, self.out = project, index, names, out
        self.plan: Plan = names.plan
        self.path = file.path
        self.whole: set[int] = set()
        self.asked = asked_of_objects(file)

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

    def put(self, at: tuple[int, int], new: str) -> None:
        if self.source.text(*at) != new:
            self.out.put(self.path, at, new)

    def where(self, offset: int) -> str:
        return self.file.where(offset)

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
                doubts = self.out.unlikely if self.names.unlikely(node.attr) else self.out.undecided
                doubts.append(self.where(at[0]) + f"  [.{node.attr}]")
            else:
                self.put(at, guess)

    def guess(self, node: ast.expr, name: str) -> str | None:
        """The new name of an attribute of an unknown object, by a map, by its other attributes, or as it is unique."""
        said = self.guesses.said(self.path, node, name)
        if said is not None:
            return said
        key = object_key(self.file, node)
        found = self.guesses.by_uses(self.asked[key] | {name}, name) if key is not None else None
        return found if found is not None else self.names.guess(name)

    def foreign(self, node: ast.expr) -> bool:
        """Whether an expression surely is of another library: a module of one, something in it, or a call of either."""
        while isinstance(node, ast.Attribute | ast.Call):
            if isinstance(node, ast.Attribute):
                spot = (node.end_lineno or 0, node.end_col_offset or 0, node.attr)
                slots = self.index.members.get(self.path, {}).get(spot)
                if slots is not None:
                    return all(not s.owner.path for s in slots)
            node = node.func if isinstance(node, ast.Call) else node.value
        binding = self.file.scopes.meant.get(id(node))
        if binding is None:
            return isinstance(node, ast.Name)
        if binding.name == "args" and b"argparse" in self.source.data:
            return True
        return binding.kinds == {"import"} and self.project.definition(self.file, binding) is None

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

    def slots(self, slots: tuple[Slot, ...] | None, name: str, at: int) -> str | None:
        """The one new name of all attributes that may be meant."""
        if slots is None:
            return None
        news = {self.plan.slots.get(s, name) for s in slots}
        if len(news) > 1:
            shown = [f"{s.owner.path or 'library'}::{s.owner.name}" for s in slots]
            self.out.problems.append(f"{self.where(at)}: .{name} of {', '.join(shown)} gets names {sorted(news)}")
        return min(news - {name}, default=name)

    def on_Call(self, node: ast.Call) -> None:
        callee = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if callee in CALLS_WITH_NAMES and len(node.args) > 1:
            self._named(node)
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
            elif not news and not callees and not self.foreign(node.func):
                guess = self.guesses.said(self.path, node.func, keyword.arg)
                if guess is not None:
                    self.put((start, start + len(keyword.arg.encode())), guess)
                    continue
                guess = self.names.guess(keyword.arg) if keyword.arg in self._fields else None
                if guess is None or keyword.arg in self._params:
                    self.out.undecided.append(self.where(start) + f"  [{keyword.arg}=]")
                elif callee in ("SimpleNamespace", "Mock", "MagicMock"):
                    news = {guess}
                elif guess != keyword.arg:
                    self.out.undecided.append(self.where(start) + f"  [{keyword.arg}=]")
            for new in news:
                self.put((start, start + len(keyword.arg.encode())), new)

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

    def _named(self, node: ast.Call) -> None:
        """An attribute's name in a string behind the object."""
        text = node.args[1]
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str) or not text.value.isidentifier():
            return
        start, end = self.source.span(text)
        at = (start + 1, end - 1)
        if self.source.text(*at) != text.value:
            return
        owner, name = self.project.resolve(self.file, node.args[0]), text.value
        new: str | None = None
        if owner is not None and not owner.name and owner.path in self.project.files:
            file = self.project.files[owner.path]
            binding = file.scopes.top.bindings.get(name)
            new = self.names.final(file, binding) if binding is not None else name
        elif owner is not None and self.names.is_class(owner):
            new = self.names.member(owner, name)
        if new is None:
            spot = (text.end_lineno or 0, text.end_col_offset or 0, name)
            new = self.slots(self.index.named.get(self.path, {}).get(spot), name, start)
        if new is None and self.names.guess(name) != name:
            guess = self.guess(node.args[0], name)
            if guess is None:
                self.out.undecided.append(self.where(start) + f'  ["{name}"]')
            new = guess
        if new is not None:
            self.put(at, new)

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
