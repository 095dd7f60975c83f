"""The new name of every binding, import, module and dotted name under a plan, and which of them would clash."""

from __future__ import annotations

import ast
import re
from functools import cached_property

from tools.renaming.index import Index, Slot
from tools.renaming.plan import Groups, Plan
from tools.renaming.project import File, Project, Symbol, module_of
from tools.renaming.scopes import Binding, Imported, Scope

COMMON: tuple[type, ...] = (list, dict, str, bytes, int, float, set, tuple, object, BaseException, re.Pattern, re.Match)


class Names:
    """Answers for one plan; results are kept."""

    def __init__(self, project: Project, groups: Groups, plan: Plan) -> None:
        self.project, self.groups, self.plan = project, groups, plan
        self.known: dict[Binding, str] = {}
        self.busy: set[Binding] = set()

    def module(self, dotted: str) -> str:
        """A module's or package's dotted name after the moves."""
        if dotted in self.plan.modules:
            return self.plan.modules[dotted]
        best = max((m for m in self._folders if dotted.startswith(f"{m}.")), key=len, default=None)
        return dotted if best is None else self._folders[best] + dotted[len(best) :]

    @cached_property
    def _folders(self) -> dict[str, str]:
        return {module_of(f"{a}__init__.py"): module_of(f"{b}__init__.py") for a, b in self.plan.folders.items()}

    def final(self, file: File, binding: Binding) -> str:
        """The name of a binding after all renames."""
        if binding in self.plan.locals:
            return self.plan.locals[binding]
        if binding in self.known:
            return self.known[binding]
        if binding in self.busy:
            return binding.name
        self.busy.add(binding)
        new = self._final(file, binding)
        self.busy.discard(binding)
        self.known[binding] = new
        return new

    def _final(self, file: File, binding: Binding) -> str:
        scope = binding.scope
        if scope.kind == "class":
            slot = Slot(Symbol(file.path, scope.qualname), binding.name)
            if slot in self.plan.slots:
                return self.plan.slots[slot]
        elif scope.kind in ("module", "function"):
            above = scope.qualname
            symbol = Symbol(file.path, f"{above}.{binding.name}" if above else binding.name)
            if symbol in self.plan.symbols:
                return self.plan.symbols[symbol]
        names = {self.imported(file, i)[1] for i in binding.imports if i.name is not None and i.alias.asname is None}
        names -= {binding.name}
        if len(names) > 1:
            self.plan.problems.append(f"{file.path}: {binding.name} is imported as {sorted(names)}")
        return min(names, default=binding.name)

    def imported(self, file: File, one: Imported) -> tuple[str, str]:
        """Module and name of a ``from`` import after the renames."""
        assert one.name is not None
        path = self.project.modules.get(one.module)
        if path is not None and (binding := self.project.files[path].scopes.top.bindings.get(one.name)) is not None:
            return self.module(one.module), self.final(self.project.files[path], binding)
        inner = f"{one.module}.{one.name}"
        if inner in self.project.modules or inner in self.project.packages:
            above, _, last = self.module(inner).rpartition(".")
            return above, last
        return self.module(one.module), one.name

    def member(self, symbol: Symbol, name: str) -> str | None:
        """The new name of a class's attribute; None where the class has none of that name."""
        if symbol not in self.groups.index.classes:
            return None
        slot = self.groups.definer(symbol, name)
        return self.plan.slots.get(slot, name) if slot is not None else None

    def of_symbol(self, symbol: Symbol) -> str:
        """The new last name of a definition."""
        if not symbol.name:
            dotted = symbol.path[:-1] if symbol.path.endswith("/") else module_of(symbol.path)
            return self.module(dotted).rpartition(".")[2]
        owner, _, last = symbol.name.rpartition(".")
        if owner and self.is_class(Symbol(symbol.path, owner)):
            return self.plan.slots.get(Slot(Symbol(symbol.path, owner), last), last)
        return self.plan.symbols.get(symbol, last)

    def is_class(self, symbol: Symbol) -> bool:
        scope = self.project.scope(symbol)
        return scope is not None and scope.kind == "class"

    def dotted(self, text: str) -> str:
        """A dotted name of a module or of something in one, with ``:`` or ``.`` between; unchanged if unknown."""
        head, colon, tail = text.partition(":")
        parts = head.split(".")
        for n in range(len(parts), 0, -1):
            module = ".".join(parts[:n])
            if module in self.project.modules or module in self.project.packages:
                new = self.module(module)
                path = self.project.modules.get(module)
                rest = parts[n:]
                if colon:
                    return f"{new}{_join(rest)}:{self.chain(path, tail)}" if path else f"{new}{_join(rest)}:{tail}"
                return new + _join(self.chain(path, ".".join(rest)).split(".") if path and rest else rest)
        return text

    def chain(self, path: str | None, names: str) -> str:
        """``Class.attribute`` of a module."""
        parts = names.split(".")
        if path is None or parts[0] not in self.project.files[path].scopes.top.bindings:
            return names
        file = self.project.files[path]
        out = [self.final(file, file.scopes.top.bindings[parts[0]])]
        symbol = self.project.lookup(path, parts[0])
        for name in parts[1:]:
            new = self.member(symbol, name) if symbol is not None else None
            out.append(name if new is None else new)
            symbol = Symbol(symbol.path, f"{symbol.name}.{name}") if symbol is not None else None
        return ".".join(out)

    @cached_property
    def attributes(self) -> dict[str, set[str]]:
        """All new names that attributes of a name have, in all classes."""
        found: dict[str, set[str]] = {}
        for symbol, facts in self.groups.index.classes.items():
            for name in facts.names:
                found.setdefault(name, set()).add(self.plan.slots.get(Slot(symbol, name), name))
        return found

    @cached_property
    def globals(self) -> dict[str, set[str]]:
        """All new names that definitions at the top of modules have."""
        found: dict[str, set[str]] = {}
        for path, file in self.project.files.items():
            for name, binding in file.scopes.top.bindings.items():
                if not binding.kinds <= {"import"}:
                    found.setdefault(name, set()).add(self.plan.symbols.get(Symbol(path, name), name))
        return found

    @cached_property
    def libraries(self) -> list[set[str]]:
        """The attributes of common types and modules of other libraries."""
        return [set(dir(kind)) for kind in (*COMMON, *_libraries())]

    @cached_property
    def foreign(self) -> set[str]:
        """Attributes of other libraries: a name of theirs is never renamed on a guess."""
        found = set().union(*self.libraries)
        for facts in self.groups.index.classes.values():
            found |= facts.foreign
        return found

    def guess(self, name: str) -> str | None:
        """The new name of an attribute of an unknown object; None: undecided. The same name: surely not renamed."""
        found = self.attributes.get(name, set()) | self.globals.get(name, set())
        if all(new == name for new in found):
            return name
        if len(found) == 1 and name not in self.foreign:
            return min(found)
        return None

    def unlikely(self, name: str) -> bool:
        """Whether an attribute of an unknown object is hardly one of those renamed: it is mostly libraries'."""
        classes = [f.names for f in self.groups.index.classes.values() if name in f.names]
        renamed = sum(slot.name == name and new != name for slot, new in self.plan.slots.items())
        return renamed * (2 if name in self.foreign else 3) < len(classes)

    def unique(self, name: str) -> str | None:
        """The one new name of a definition that prose may mean; None: it is not renamed, or not everywhere alike.

        A name that stands alone in a string of the code may be a key, a label or a flag.
        """
        if name.islower() and name in self.quoted:
            return None
        found = self.attributes.get(name, set()) | self.globals.get(name, set())
        return min(found) if len(found) == 1 and found != {name} else None

    @cached_property
    def quoted(self) -> set[str]:
        """Strings that are names, and flags as names."""
        found: set[str] = set()
        for file in self.project.files.values():
            for node in ast.walk(file.source.tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
                    if node.value.isidentifier():
                        found.add(node.value)
                    found |= {f[2:].replace("-", "_") for f in re.findall(r"--[a-z][a-z0-9-]+", node.value)}
                    found |= set(re.findall(r"(?<=[{,])(\w+)=", node.value))
        return found


def _join(parts: list[str]) -> str:
    return "".join(f".{p}" for p in parts)


def _libraries() -> list[object]:
    import argparse
    import asyncio
    import inspect
    import socket
    import subprocess
    import threading
    from pathlib import Path

    found: list[object] = [Path, socket.socket, subprocess.Popen, threading.Thread, threading.Event, asyncio.Task,
                           asyncio.Queue, asyncio.Event, asyncio.StreamReader, asyncio.StreamWriter, inspect.Signature,
                           inspect.Parameter, argparse.Namespace, argparse.ArgumentParser]  # fmt: skip
    try:
        import httpx
        from PIL import Image

        found += [httpx.Response, httpx.Request, httpx.Client, Image.Image]
    except ImportError:
        pass
    try:
        import numpy
        import torch
    except ImportError:
        return found
    from torch import fx

    found += [torch.ops.aten.add.Tensor, torch.UntypedStorage, fx.Node, fx.Graph, fx.GraphModule, torch.Generator]
    return [*found, torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.cuda, numpy, numpy.ndarray]


def captured(file: File, names: Names) -> list[str]:
    """Each name of a file that would be bound twice in its scope, or would mean another binding than today."""
    problems: list[str] = []
    after: dict[Scope, dict[str, Binding]] = {}
    for scope in file.scopes.top.walk():
        held: dict[str, Binding] = {}
        for binding in scope.bindings.values():
            new = names.final(file, binding)
            if new in held:
                both = f"{held[new].name} and {binding.name}"
                first = (binding.spots or held[new].spots or [(0, 0)])[0][0]
                problems.append(f"{file.where(first)}: {both} would both be {new} in {_shown(scope)}")
            held[new] = binding
        after[scope] = held
    for scope in file.scopes.top.walk():
        for binding in scope.bindings.values():
            new = names.final(file, binding)
            for user, at in binding.users:
                offset = max(at[0], binding.since or 0) if user is binding.scope else at[0]
                found = _find(user, new, after, offset)
                if found is not None and found is not binding:
                    problems.append(
                        f"{file.where(at[0])}: {binding.name} -> {new} would mean the {new} of {_shown(found.scope)}"
                        f" (today {found.name})"
                    )
                    break
    for scope, name, at in file.scopes.unknown:
        found = _find(scope, name, after, at[0])
        if found is not None:
            shown = f"{found.name} in {_shown(found.scope)}"
            problems.append(f"{file.where(at[0])}: builtin {name} would mean what was {shown}")
    return problems


def _shown(scope: Scope) -> str:
    return f"{scope.kind} {scope.qualname}" if scope.kind != "module" else "the module"


def _find(scope: Scope, name: str, after: dict[Scope, dict[str, Binding]], offset: int) -> Binding | None:
    at: Scope | None = scope
    while at is not None:
        found = after[at].get(name)
        if found is not None and (at is scope or at.kind != "class"):
            outer = _find(at.parent, name, after, offset) if at.kind == "class" and at.parent is not None else None
            if found.since is None or offset >= found.since or outer is None:
                return found
        at = at.parent
    return None


def doubled_members(index: Index, names: Names) -> list[str]:
    """Adds a problem where two attributes of one class would have one name."""
    problems: list[str] = []
    seen: set[str] = set()
    for symbol, facts in index.classes.items():
        after: dict[str, tuple[str, Slot]] = {}
        for base in facts.order:
            of_base = index.classes.get(base)
            for name in of_base.names if of_base is not None else ():
                slot = Slot(base, name)
                new = names.plan.slots.get(slot, name)
                if new in after and after[new][0] != name:
                    a, b = after[new][1], slot
                    text = " and ".join(sorted(f"{s.owner.path}::{s.owner.name}.{s.name}" for s in (a, b)))
                    if text not in seen:
                        seen.add(text)
                        problems.append(f"{text} would both be {new} (in {symbol.path}::{symbol.name})")
                if new != name and new in facts.foreign:
                    problems.append(f"{base.path}::{base.name}.{name} -> {new}: a library's class has {new}")
                after.setdefault(new, (name, slot))
    return problems
