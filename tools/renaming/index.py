"""What mypy knows of a repository, in a form that is quickly read again: members, callees, classes, protocols."""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tools.renaming.project import PACKAGES, Project, Symbol

VERSION = 5
BESIDE = ("tests", "benchmarks", "deploy", "tools")


class Slot(NamedTuple):
    """An attribute of a class; ``owner`` is the class that defines it, without a file for one of another library."""

    owner: Symbol
    name: str


@dataclass
class ClassFacts:
    """A class of the project: the classes it derives from, in order and itself first, and names defined in its body."""

    order: list[Symbol]
    names: set[str]
    foreign: set[str]
    protocol: bool
    synthesized: bool
    """Its fields are the parameters of its constructor."""
    members: set[str] = field(default_factory=set)
    """Of a protocol: all that it asks for."""


Spot = tuple[int, int, str]
REFERENCES = {"node", "info", "def_var", "type", "unanalyzed_type", "original_def", "original_first_arg"}
"""Attributes of mypy's nodes that lead to other places."""


@dataclass
class Index:
    """``members`` and ``named``: what an attribute, or a string that names one, means; None: mypy does not know.

    Keys are the end of the node as ast has it, and the name.
    """

    members: dict[str, dict[Spot, tuple[Slot, ...] | None]] = field(default_factory=dict)
    named: dict[str, dict[Spot, tuple[Slot, ...] | None]] = field(default_factory=dict)
    callees: dict[str, dict[tuple[int, int], tuple[Symbol, ...]]] = field(default_factory=dict)
    classes: dict[Symbol, ClassFacts] = field(default_factory=dict)
    tried: set[tuple[Symbol, Symbol]] = field(default_factory=set)
    """Classes that were checked against a protocol."""
    errors: list[str] = field(default_factory=list)


def load_index(project: Project, cache: Path) -> Index:
    """Of the files as they are; kept in a file, as mypy takes minutes."""
    digest = sha256(str(VERSION).encode())
    for path, file in sorted(project.files.items()):
        digest.update(path.encode() + b"\0" + file.source.data + b"\0")
    if cache.is_file():
        with cache.open("rb") as stored:
            key, index = pickle.load(stored)
        if key == digest.hexdigest():
            assert isinstance(index, Index)
            return index
    index = build_index(project)
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.open("wb") as out:
        pickle.dump((digest.hexdigest(), index), out)
    return index


def build_index(project: Project, passes: int = 2) -> Index:
    """Type checks all files; each further pass knows what the one before saw at places without annotations."""
    from tools.renaming.hints import Hints, Observer, Typist

    hints = Hints()
    for last in (n == passes - 1 for n in range(passes)):
        typist = Typist(project, hints)
        with tempfile.TemporaryDirectory() as folder:
            result = _check(project, Path(folder), {p: typist.text(f) for p, f in project.files.items()})
            reader = _Reader(project, result)
            if last:
                return reader.index()
            hints = Observer(reader).hints()
        del reader, result, typist
        gc.collect()
    raise ValueError("no pass")


def _check(project: Project, folder: Path, texts: dict[str, str]) -> Any:
    """One build of mypy's; raises CompileError where a text is not Python."""
    from mypy import build
    from mypy.main import process_options

    before = Path.cwd()
    sources = _links(project, folder)
    os.chdir(folder)
    try:
        config = project.root / "pyproject.toml"
        flags = ["--config-file", str(config)] if config.is_file() else ["--config-file="]
        _, options = process_options([*flags, "-c", "pass"])
        options.cache_dir, options.incremental = os.devnull, False
        options.export_types = options.preserve_asts = True
        options.native_parser = False
        options.mypy_path = [str(folder)]
        all_sources = [build.BuildSource(real, module, texts[path]) for real, module, path in sources]
        return build.build(all_sources, options, None, lambda *a: None)
    finally:
        os.chdir(before)


def _links(project: Project, base: Path) -> list[tuple[str, str, str]]:
    """Links that give each file its import name; link, module and path of each."""
    (base / "trencadis").mkdir()
    root = project.root
    for path in (root / "trencadis").iterdir() if (root / "trencadis").is_dir() else ():
        if path.name != "__pycache__":
            (base / "trencadis" / path.name).symlink_to(path)
    for name in (*PACKAGES, *BESIDE):
        link = base / "trencadis" / name if name in PACKAGES else base / name
        if (root / name).is_dir():
            link.symlink_to(root / name)
    sources = []
    for module, file in project.modules.items():
        top, *rest = Path(file).parts
        under = base / "trencadis" / top if top in PACKAGES else base / top
        real = under.joinpath(*rest) if under.exists() and rest else root / file
        sources.append((str(real), module, file))
    return sources


class _Reader:
    """Reads a build of mypy's; its classes are loaded only here."""

    def __init__(self, project: Project, result: Any) -> None:
        from mypy import nodes, types
        from mypy.patterns import Pattern

        self.project, self.result = project, result
        self.nodes, self.types = nodes, types
        self.found = Index(errors=list(result.errors))
        self.info_of: dict[str, Any] = {}
        self.parts: dict[type, list[str]] = {}
        self.inside = (nodes.Statement, nodes.Expression, nodes.Block, nodes.Argument, Pattern)

    def index(self) -> Index:
        for module, path in self.project.modules.items():
            tree = self.result.files.get(module)
            if tree is None:
                continue
            members: dict[Spot, tuple[Slot, ...] | None] = {}
            named: dict[Spot, tuple[Slot, ...] | None] = {}
            callees: dict[tuple[int, int], tuple[Symbol, ...]] = {}
            for node in self.walk(tree):
                if isinstance(node, self.nodes.MemberExpr):
                    self.member(members, node, self.receiver(node.expr))
                elif isinstance(node, self.nodes.SuperExpr):
                    self.member(members, node, node.info.mro[1:] if node.info is not None else None)
                elif isinstance(node, self.nodes.CallExpr):
                    self.call(callees, node)
                    self.strings(named, node)
                elif isinstance(node, self.nodes.ClassDef) and node.info is not None:
                    self.class_facts(node.info)
            self.found.members[path], self.found.named[path], self.found.callees[path] = members, named, callees
        self.protocols()
        return self.found

    def walk(self, tree: Any) -> Iterator[Any]:
        """All statements, expressions, patterns and functions of a module."""
        seen: set[int] = set()
        todo = list(tree.defs)
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            todo += self.children(node)

    def children(self, node: Any) -> list[Any]:
        """The nodes directly inside one."""
        kind = type(node)
        if kind not in self.parts:
            self.parts[kind] = [n for n in _attributes(kind) if n not in REFERENCES]
        found = []
        stack = [getattr(node, name, None) for name in self.parts[kind]]
        while stack:
            one = stack.pop()
            if isinstance(one, self.inside):
                found.append(one)
            elif isinstance(one, list | tuple):
                stack += one
        return found

    def class_symbol(self, info: Any) -> Symbol:
        """The class as this project names it; without a file for another library's."""
        path = self.project.modules.get(info.module_name)
        if path is None:
            return Symbol("", info.fullname)
        file = self.project.files[path]
        name = file.class_lines.get(info.defn.line, info.name.split("@")[0])
        symbol = Symbol(path, name)
        self.info_of[info.fullname] = info
        return symbol

    def receiver(self, node: Any) -> list[Any] | None:
        """The orders of classes in which an attribute of an expression is looked up; None: unknown."""
        kind = self.result.types.get(node)
        if kind is None:
            info = getattr(node, "node", None)
            return [info.mro] if isinstance(info, self.nodes.TypeInfo) else None
        return self.orders(kind)

    def orders(self, kind: Any) -> list[Any] | None:
        """Of a type; [] where it has no attributes of this project."""
        t = self.types
        kind = t.get_proper_type(kind)
        if isinstance(kind, t.UnionType):
            parts = [self.orders(i) for i in kind.items]
            known = [p for p in parts if p is not None]
            return [o for p in known for o in p] if known and any(known) else None if len(known) < len(parts) else []
        if isinstance(kind, t.Instance):
            return [kind.type.mro]
        if isinstance(kind, t.TupleType):
            return [kind.partial_fallback.type.mro]
        if isinstance(kind, t.TypeVarType):
            return self.orders(kind.upper_bound)
        if isinstance(kind, t.TypeType):
            return self.orders(kind.item)
        if isinstance(kind, t.LiteralType):
            return self.orders(kind.fallback)
        if isinstance(kind, t.Overloaded):
            return self.orders(kind.items[0])
        if isinstance(kind, t.CallableType):
            if kind.is_type_obj():
                made = t.get_proper_type(kind.ret_type)
                return [kind.type_object().mro] if made is not None else None
            return [kind.fallback.type.mro]
        if isinstance(kind, t.NoneType | t.UninhabitedType | t.TypedDictType):
            return []
        return None

    def member(self, members: dict[Spot, tuple[Slot, ...] | None], node: Any, orders: list[Any] | None) -> None:
        if isinstance(node, self.nodes.SuperExpr) and orders is not None:
            orders = [orders]
        spot = (node.end_line or 0, node.end_column or 0, node.name)
        self.add(members, spot, self.slots(orders, node.name))

    def add(self, members: dict[Spot, tuple[Slot, ...] | None], spot: Spot, slots: tuple[Slot, ...] | None) -> None:
        if spot in members and members[spot] is not None:
            slots = tuple(dict.fromkeys((*(members[spot] or ()), *(slots or ()))))
        members[spot] = slots

    def slots(self, orders: list[Any] | None, name: str) -> tuple[Slot, ...] | None:
        """The definitions of ``name`` that may be meant; None: unknown."""
        if orders is None:
            return None
        found: list[Slot] = []
        for order in orders:
            for info in order:
                if name in info.names:
                    found.append(Slot(self.class_symbol(info), name))
                    break
        return tuple(dict.fromkeys(found)) if found or not orders else None

    def call(self, callees: dict[tuple[int, int], tuple[Symbol, ...]], node: Any) -> None:
        """Whom a call with keywords calls, for calls that no names in the source explain."""
        if not any(node.arg_names):
            return
        kind = self.result.types.get(node.callee)
        found = [s for s in self.called(kind) if s.path] if kind is not None else []
        name = getattr(node.callee, "name", "")
        if name in ("replace", "_replace", "evolve"):
            first = getattr(node.callee, "expr", None) if name == "_replace" else node.args[0]
            orders = self.receiver(first) if first is not None else None
            found += [self.class_symbol(order[0]) for order in orders or ()]
        if not found:
            for argument in node.args:
                kind = self.result.types.get(argument)
                found += [s for s in self.called(kind) if s.path] if kind is not None else []
        if found:
            callees[(node.callee.end_line or 0, node.callee.end_column or 0)] = tuple(dict.fromkeys(found))

    def called(self, kind: Any) -> list[Symbol]:
        t = self.types
        kind = t.get_proper_type(kind)
        if isinstance(kind, t.UnionType):
            return [s for i in kind.items for s in self.called(i)]
        if isinstance(kind, t.Overloaded):
            return [s for i in kind.items for s in self.called(i)]
        if isinstance(kind, t.TypeType):
            return self.called_class(kind.item)
        if isinstance(kind, t.CallableType):
            if kind.is_type_obj():
                return [self.class_symbol(kind.type_object())]
            return self.function(kind.definition)
        if isinstance(kind, t.Instance):
            node = kind.type.get("__call__")
            return self.function(node.node) if node is not None and node.node is not None else []
        return []

    def called_class(self, kind: Any) -> list[Symbol]:
        kind = self.types.get_proper_type(kind)
        return [self.class_symbol(kind.type)] if isinstance(kind, self.types.Instance) else []

    def function(self, node: Any) -> list[Symbol]:
        """The functions of this project behind a node of mypy's."""
        if isinstance(node, self.nodes.Decorator):
            node = node.func
        if isinstance(node, self.nodes.OverloadedFuncDef):
            return [s for i in (*node.items, node.impl) if i is not None for s in self.function(i)]
        if not isinstance(node, self.nodes.FuncDef):
            return []
        module = node.fullname
        while module and module not in self.project.modules:
            module = module.rpartition(".")[0]
        if not module:
            return []
        path = self.project.modules[module]
        name = self.project.files[path].function_lines.get(node.line)
        return [Symbol(path, name)] if name is not None else []

    def strings(self, named: dict[Spot, tuple[Slot, ...] | None], node: Any) -> None:
        """Attributes that are named by a string in the second place: getattr, setattr and their like."""
        callee = getattr(node.callee, "name", "")
        if not callee.endswith(("attr", "object")) or len(node.args) < 2:
            return
        text = node.args[1]
        if isinstance(text, self.nodes.StrExpr) and text.value.isidentifier():
            spot = (text.end_line or 0, text.end_column or 0, text.value)
            self.add(named, spot, self.slots(self.receiver(node.args[0]), text.value))

    def class_facts(self, info: Any) -> None:
        symbol = self.class_symbol(info)
        if not symbol.path or symbol in self.found.classes:
            return
        made = info.get("__init__")
        synthesized = bool(info.is_named_tuple or (made is not None and made.plugin_generated))
        mro = [self.class_symbol(i) for i in info.mro]
        foreign = {n for i, s in zip(info.mro, mro, strict=True) if not s.path for n in i.names}
        names = {n for n, node in info.names.items() if not node.plugin_generated}
        members = set(info.protocol_members) if info.is_protocol else set()
        self.found.classes[symbol] = ClassFacts(mro, names, foreign, info.is_protocol, synthesized, members)

    def protocols(self) -> None:
        from mypy.typestate import type_state

        for left, rights in type_state._attempted_protocols.items():
            for right in rights:
                pair = [self.info_of.get(name) for name in (left, right)]
                if all(info is not None for info in pair):
                    self.found.tried.add((self.class_symbol(pair[0]), self.class_symbol(pair[1])))


def _attributes(kind: type) -> list[str]:
    names: list[str] = []
    for one in kind.__mro__:
        names += getattr(one, "__mypyc_attrs__", ())
    return list(dict.fromkeys(names))
