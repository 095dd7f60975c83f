"""What follows from the maps: every definition that gets a new name, overrides and implementations included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.renaming.hints import Hints, Typist, is_fixture, parametrized
from tools.renaming.index import ClassFacts, Index, Slot
from tools.renaming.maps import Maps
from tools.renaming.project import Project, Symbol, module_of
from tools.renaming.scopes import Binding, Scope

LEAST_MEMBERS = 3
"""A class that was never checked against a protocol implements it if it has all members, and these are so many."""


@dataclass
class Plan:
    """New names. ``moves`` holds every file that moves, ``modules`` the dotted names that change."""

    moves: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    symbols: dict[Symbol, str] = field(default_factory=dict)
    slots: dict[Slot, str] = field(default_factory=dict)
    params: dict[tuple[Symbol, str], str] = field(default_factory=dict)
    locals: dict[Binding, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    extended: list[str] = field(default_factory=list)


class Groups:
    """Attributes that must have one name: an override and what it overrides, a protocol's member and what fits it."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.above: dict[Slot, Slot] = {}
        self.foreign: set[Slot] = set()
        self.members: dict[Slot, list[Slot]] = defaultdict(list)
        for symbol, facts in index.classes.items():
            self._inherit(symbol, facts)
        for left, right in self._implementations():
            for name in index.classes[right].members:
                a, b = self.definer(left, name), self.definer(right, name)
                if a is not None and b is not None:
                    self.join(a, b)
        for slot in list(self.above):
            self.members[self.root(slot)].append(slot)
        self.foreign = {self.root(s) for s in self.foreign}

    def root(self, slot: Slot) -> Slot:
        self.above.setdefault(slot, slot)
        while self.above[slot] != slot:
            self.above[slot] = self.above[self.above[slot]]
            slot = self.above[slot]
        return slot

    def join(self, a: Slot, b: Slot) -> None:
        self.above[self.root(a)] = self.root(b)

    def definer(self, symbol: Symbol, name: str) -> Slot | None:
        """The class that an attribute of a class comes from."""
        for base in self.index.classes[symbol].order:
            facts = self.index.classes.get(base)
            if facts is not None and name in facts.names:
                return Slot(base, name)
        return None

    def group(self, slot: Slot) -> list[Slot]:
        return self.members.get(self.root(slot)) or [slot]

    def _inherit(self, symbol: Symbol, facts: ClassFacts) -> None:
        first: dict[str, Slot] = {}
        for base in facts.order:
            of_base = self.index.classes.get(base)
            for name in of_base.names if of_base is not None else ():
                if name.startswith("__"):
                    continue
                slot = Slot(base, name)
                self.root(slot)
                if name in first:
                    self.join(slot, first[name])
                first.setdefault(name, slot)
        self.foreign |= {slot for name, slot in first.items() if name in facts.foreign}

    def _implementations(self) -> Iterable[tuple[Symbol, Symbol]]:
        every: dict[Symbol, set[str]] = {}
        for symbol, facts in self.index.classes.items():
            found = set(facts.foreign)
            for base in facts.order:
                found |= self.index.classes[base].names if base in self.index.classes else set()
            every[symbol] = found
        for right, asked in self.index.classes.items():
            own = {m for m in asked.members if not m.startswith("__")}
            if not asked.protocol or not own:
                continue
            for left, facts in self.index.classes.items():
                if left == right or right in facts.order or not own <= every[left]:
                    continue
                if (left, right) in self.index.tried or len(own) >= LEAST_MEMBERS:
                    yield left, right


class Planner:
    """Builds the plan of all maps for one project."""

    def __init__(self, project: Project, index: Index, maps: Maps) -> None:
        self.project, self.index, self.maps = project, index, maps
        self.plan = Plan(problems=list(maps.problems))
        complete(project, index)
        self.groups = Groups(index)

    def build(self) -> Plan:
        self._moves()
        for (path, name), new in self.maps.symbols.items():
            self._symbol(path, name, new)
        for (path, name, param), new in self.maps.params.items():
            self._param(path, name, param, new)
        for (path, name), names in self.maps.locals.items():
            self._locals(path, name, names)
        self._fixtures()
        return self.plan

    def _fixtures(self) -> None:
        """Parameters of tests follow the fixtures that they name; one whose fixture keeps its name is a problem."""
        typist = Typist(self.project, Hints())
        for path, file in self.project.files.items():
            for name, scope in file.nodes.items():
                if scope.kind != "function" or not (is_fixture(scope.node) or scope.name.startswith("test")):
                    continue
                given = parametrized(scope.node) | (parametrized(scope.parent.node) if scope.parent else set())
                for binding in list(scope.bindings.values()):
                    if "param" not in binding.kinds or binding.name in given:
                        continue
                    fixture = typist.fixture(file, binding.name)
                    if fixture is None:
                        continue
                    new = self.plan.symbols.get(fixture, binding.name)
                    held = self.plan.locals.get(binding, new)
                    if held != new:
                        shown = f"{fixture.path}::{fixture.name}"
                        self.plan.problems.append(
                            f"{path}::{name}({binding.name}) -> {held}, but the fixture {shown} -> {new}"
                        )
                    elif new != binding.name:
                        self.plan.locals[binding] = new

    def _origin(self, *key: str) -> str:
        return self.maps.origin.get(key, "")

    def _moves(self) -> None:
        plan, names = self.plan, set(self.project.names)
        for old, new in sorted(self.maps.files.items(), key=lambda x: (x[0].endswith("/"), -len(x[0]))):
            if old.endswith("/"):
                inside = [n for n in self.project.names if n.startswith(old)]
                if not new.endswith("/"):
                    plan.problems.append(f"{self._origin(old)}: {old} -> {new}: a folder becomes a folder")
                elif not inside:
                    plan.warnings.append(f"{self._origin(old)}: no folder {old}")
                else:
                    plan.folders[old] = new
                for name in inside:
                    plan.moves.setdefault(name, new + name[len(old) :])
            elif old not in names:
                plan.warnings.append(f"{self._origin(old)}: no file {old}")
            elif new.endswith("/"):
                plan.problems.append(f"{self._origin(old)}: {old} -> {new}: a file becomes a file")
            else:
                plan.moves[old] = new
        self._taken(names)
        for old, new in plan.moves.items():
            if old.endswith(".py") and module_of(old) != module_of(new):
                plan.modules[module_of(old)] = module_of(new)
        self._emptied()
        for old, new in plan.folders.items():
            plan.modules.setdefault(module_of(old + "__init__.py"), module_of(new + "__init__.py"))

    def _taken(self, names: set[str]) -> None:
        """Adds a problem where a file would take the place of another."""
        plan = self.plan
        targets: dict[str, str] = {}
        for old, new in plan.moves.items():
            if new in targets or (new in names and new not in plan.moves):
                plan.problems.append(f"{self._origin(old)}: {old} -> {new}: taken by {targets.get(new, new)}")
            targets[new] = old

    def _emptied(self) -> None:
        """A folder whose files all go to one other folder, one by one, moves as well."""
        inside: dict[str, list[str]] = defaultdict(list)
        for name in self.project.names:
            parts = name.split("/")
            for i in range(1, len(parts)):
                inside["/".join(parts[:i]) + "/"].append(name)
        for folder, names in inside.items():
            if any(folder.startswith(f) for f in self.plan.folders) or not all(n in self.plan.moves for n in names):
                continue
            targets = set()
            for name in names:
                depth = name[len(folder) :].count("/") + 1
                targets.add("/".join(self.plan.moves[name].split("/")[:-depth]) + "/")
            if len(targets) == 1 and targets != {folder}:
                self.plan.folders[folder] = min(targets)

    def _owner(self, path: str, name: str) -> Scope | None:
        """The scope that a definition stands in."""
        file = self.project.files.get(path)
        if file is None:
            return None
        above = name.rpartition(".")[0]
        return file.nodes.get(above) if above else file.scopes.top

    def _symbol(self, path: str, name: str, new: str) -> None:
        where = f"{self._origin(path, name)}: {path}::{name}"
        owner, last = self._owner(path, name), name.rpartition(".")[2]
        if owner is None:
            self.plan.warnings.append(f"{where}: not found")
        elif owner.kind == "class":
            self._member(Symbol(path, owner.qualname), last, new, where)
        elif last not in owner.bindings:
            self.plan.warnings.append(f"{where}: not found")
        elif owner.bindings[last].kinds == {"import"}:
            self.plan.problems.append(f"{where}: imported there; name the file that defines it")
        else:
            self.plan.symbols[Symbol(path, name)] = new

    def _member(self, owner: Symbol, name: str, new: str, where: str) -> None:
        facts = self.index.classes.get(owner)
        if facts is None or name not in facts.names:
            inherited = self.groups.definer(owner, name) if facts is not None else None
            hint = f"; {inherited.owner.path}::{inherited.owner.name} defines it" if inherited is not None else ""
            self.plan.warnings.append(f"{where}: not found{hint}")
            return
        slot = Slot(owner, name)
        if self.groups.root(slot) in self.groups.foreign:
            self.plan.problems.append(f"{where}: another library's class defines it too")
            return
        group = self.groups.group(slot)
        for other in group:
            held = self.plan.slots.get(other, new)
            if held != new:
                self.plan.problems.append(f"{where} -> {new}, but {_show(other)} -> {held}, and they share one name")
            self.plan.slots[other] = new
        others = sorted(_show(s) for s in group if s != slot)
        if others:
            self.plan.extended.append(f"{owner.path}::{owner.name}.{name} -> {new}: also {', '.join(others)}")

    def _param(self, path: str, name: str, param: str, new: str) -> None:
        where = f"{self._origin(path, name, param)}: {path}::{name}({param})"
        scope = self.project.scope(Symbol(path, name))
        if scope is not None and scope.kind == "class":
            facts = self.index.classes.get(Symbol(path, name))
            if facts is not None and facts.synthesized:
                self._member(Symbol(path, name), param, new, where)
                return
            name += ".__init__"
            scope = self.project.scope(Symbol(path, name))
        if scope is None or param not in scope.bindings or "param" not in scope.bindings[param].kinds:
            self.plan.warnings.append(f"{where}: not found")
            return
        self._one_param(Symbol(path, name), param, new, where)
        assert scope.parent is not None
        if scope.parent.kind == "class" and scope.name == "__init__":
            base = Symbol(path, scope.parent.qualname)
            for derived, facts in self.index.classes.items():
                inner = Symbol(derived.path, f"{derived.name}.__init__")
                found = self.project.scope(inner) if base in facts.order[1:] else None
                if found is not None and param in found.bindings and "param" in found.bindings[param].kinds:
                    self._one_param(inner, param, new, where)
        elif scope.parent.kind == "class" and not scope.name.startswith("__"):
            for slot in self.groups.group(Slot(Symbol(path, scope.parent.qualname), scope.name)):
                other = Symbol(slot.owner.path, f"{slot.owner.name}.{slot.name}")
                found = self.project.scope(other)
                if found is not None and param in found.bindings and "param" in found.bindings[param].kinds:
                    self._one_param(other, param, new, where)

    def _one_param(self, symbol: Symbol, param: str, new: str, where: str) -> None:
        held = self.plan.params.get((symbol, param), new)
        if held != new:
            self.plan.problems.append(f"{where} -> {new}, but elsewhere {held}")
        self.plan.params[symbol, param] = new
        for scope in self.project.files[symbol.path].scopes.top.walk():
            if scope.kind == "function" and scope.qualname == symbol.name and param in scope.bindings:
                self.plan.locals[scope.bindings[param]] = new

    def _locals(self, path: str, name: str, names: dict[str, str]) -> None:
        file = self.project.files.get(path)
        top = (
            file.scopes.top if file is not None and name == "*" else file.nodes.get(name) if file is not None else None
        )
        if top is None:
            self.plan.warnings.append(f"[locals] {path}::{name}: not found")
            return
        for old, new in names.items():
            found = False
            for scope in top.walk():
                binding = scope.bindings.get(old)
                if binding is None or scope.kind in ("module", "class") or binding.kinds == {"import"}:
                    continue
                found = True
                if "param" in binding.kinds and scope.kind == "function":
                    if (Symbol(path, scope.qualname), old) not in self.plan.params:
                        self._param(path, scope.qualname, old, new)
                else:
                    self.plan.locals.setdefault(binding, new)
            if not found:
                self.plan.warnings.append(f"[locals] {path}::{name} {old}: not found")


def _show(slot: Slot) -> str:
    return f"{slot.owner.path}::{slot.owner.name}.{slot.name}"


def complete(project: Project, index: Index) -> None:
    """Adds classes that mypy left out, as in code for another platform, by their source alone."""
    for path, file in project.files.items():
        for name, scope in file.nodes.items():
            symbol = Symbol(path, name)
            if scope.kind != "class":
                continue
            if symbol not in index.classes:
                index.classes[symbol] = ClassFacts([symbol], set(scope.bindings), set(), False, False)
            else:
                index.classes[symbol].names |= set(scope.bindings)
