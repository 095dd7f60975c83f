"""What an attribute of an object of unknown type means: by a map, or by all that is asked of the object."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from tools.renaming.index import Index, Slot
from tools.renaming.names import Names
from tools.renaming.plan import Plan
from tools.renaming.project import File, Project, Symbol
from tools.renaming.scopes import Binding

Key = tuple[Binding, str]
HAND_ON = ("import_module", "getattr", "next", "max", "min", "copy", "deepcopy", "cast", "replace", "partial", "run")
"""Functions of other libraries that give back what they were given."""


class Guesses:
    """For all files; ``uses`` are new names by file glob, of attributes as ``name`` or ``object.name``."""

    def __init__(self, names: Names, uses: dict[str, dict[str, str]]) -> None:
        self.names, self.uses = names, uses

    @cached_property
    def owners(self) -> dict[str, set[Symbol]]:
        """The classes that have an attribute, their bases' included."""
        found: dict[str, set[Symbol]] = defaultdict(set)
        classes = self.names.groups.index.classes
        for symbol, facts in classes.items():
            every = set(facts.foreign)
            for base in facts.order:
                every |= classes[base].names if base in classes else set()
            for name in every:
                found[name].add(symbol)
        return found

    def said(self, path: str, node: ast.expr | None, name: str) -> str | None:
        """What a map says about an unknown use."""
        holder = getattr(node, "attr", getattr(node, "id", ""))
        found = None
        for glob, table in self.uses.items():
            if path == glob or fnmatchcase(path, glob):
                found = table.get(f"{holder}.{name}", table.get(name, found))
        return found

    def by_uses(self, asked: set[str], name: str) -> str | None:
        """The new name, where all classes that have everything ``asked`` agree."""
        if len(asked) < 2 or any(asked <= attributes for attributes in self.names.libraries):
            return None
        fitting = set.intersection(*(self.owners.get(a, set()) for a in asked))
        news = {self.names.member(c, name) for c in fitting}
        return news.pop() if len(news) == 1 else None


def asked_of_objects(file: File) -> dict[Key, set[str]]:
    """The attributes that are asked of each variable, and of each chain of attributes of one."""
    found: dict[Key, set[str]] = defaultdict(set)
    for node in ast.walk(file.source.tree):
        if isinstance(node, ast.Attribute):
            key = object_key(file, node.value)
            if key is not None:
                found[key].add(node.attr)
    return found


def object_key(file: File, node: ast.expr) -> Key | None:
    """What stands for an object: a variable, and attributes of it."""
    chain = []
    while isinstance(node, ast.Attribute):
        chain.append(node.attr)
        node = node.value
    binding = file.scopes.meant.get(id(node)) if isinstance(node, ast.Name) else None
    return (binding, ".".join(reversed(chain))) if binding is not None else None


@dataclass
class Edits:
    """Replacements by file and byte offsets, and uses that a human must decide."""

    by_file: dict[str, dict[tuple[int, int], str]] = field(default_factory=lambda: defaultdict(dict))
    problems: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    unlikely: list[str] = field(default_factory=list)
    """Undecided too, but hardly a name of this project."""
    guessed: list[str] = field(default_factory=list)
    """Renamed although the object has no known type: no other attribute has the name."""

    def put(self, path: str, at: tuple[int, int], new: str) -> None:
        held = self.by_file[path].get(at)
        if held is not None and held != new:
            self.problems.append(f"{path}: bytes {at}: both {held} and {new}")
        self.by_file[path][at] = new


class Doubts:
    """What the edits of one file share: where they go, and what is decided where no type is known."""

    def __init__(self, file: File, project: Project, index: Index, names: Names, guesses: Guesses, out: Edits) -> None:
        self.file, self.source, self.guesses = file, file.source, guesses
        self.project, self.index, self.names, self.out = project, index, names, out
        self.plan: Plan = names.plan
        self.path = file.path
        self.whole: set[int] = set()
        self.asked = asked_of_objects(file)

    def put(self, at: tuple[int, int], new: str) -> None:
        if self.source.text(*at) != new:
            self.out.put(self.path, at, new)

    def where(self, offset: int) -> str:
        return self.file.where(offset)

    def guess(self, node: ast.expr, name: str, certain: bool = True) -> str | None:
        """The new name of an attribute of an unknown object, by a map, by its other attributes, or as it is unique.

        Not ``certain``: it may be no attribute at all, so that being unique does not count.
        """
        said = self.guesses.said(self.path, node, name)
        if said is not None:
            return said
        key = object_key(self.file, node)
        found = self.guesses.by_uses(self.asked[key] | {name}, name) if key is not None else None
        if found is not None or not certain:
            return found
        unique = self.names.guess(name)
        if unique not in (None, name):
            self.out.guessed.append(f"{self.where(self.source.span(node)[0])}  [.{name}] {unique}")
        return unique

    def foreign(self, node: ast.expr) -> bool:
        """Whether an expression surely is of another library: a module of one, something in it, or a call of either."""
        while isinstance(node, ast.Attribute | ast.Call):
            if isinstance(node, ast.Attribute):
                spot = (node.end_lineno or 0, node.end_col_offset or 0, node.attr)
                slots = self.index.members.get(self.path, {}).get(spot)
                if slots is not None:
                    return node.attr != "state" and all(not s.owner.path for s in slots)
            elif getattr(node.func, "id", getattr(node.func, "attr", "")) in HAND_ON:
                return False
            node = node.func if isinstance(node, ast.Call) else node.value
        binding = self.file.scopes.meant.get(id(node))
        if binding is None:
            return isinstance(node, ast.Name)
        if binding.name == "args" and b"argparse" in self.source.data:
            return True
        return binding.kinds == {"import"} and self.project.definition(self.file, binding) is None

    def slots(self, slots: tuple[Slot, ...] | None, name: str, at: int) -> str | None:
        """The one new name of all attributes that may be meant."""
        if slots is None:
            return None
        news = {self.plan.slots.get(s, name) for s in slots}
        if len(news) > 1:
            shown = [f"{s.owner.path or 'library'}::{s.owner.name}" for s in slots]
            self.out.problems.append(f"{self.where(at)}: .{name} of {', '.join(shown)} gets names {sorted(news)}")
        return min(news - {name}, default=name)

    def doubt(self, at: int, name: str, shown: str) -> None:
        """Notes a use that nothing decides, with the names that it may get."""
        news = sorted((self.names.attributes.get(name, set()) | self.names.globals.get(name, set())) - {name})
        doubts = self.out.unlikely if self.names.unlikely(name) else self.out.undecided
        doubts.append(f"{self.where(at)}  [{shown}] {' or '.join(news)}")

    def pair(self, holder: ast.expr, text: ast.expr, certain: bool) -> None:
        """The name of an attribute in a string behind its object; not ``certain``: it may be any string."""
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str) or not text.value.isidentifier():
            return
        start, end = self.source.span(text)
        at = (start + 1, end - 1)
        if self.source.text(*at) != text.value:
            return
        owner, name = self.project.resolve(self.file, holder), text.value
        new: str | None = None
        if owner is not None and not owner.name and owner.path in self.project.files:
            file = self.project.files[owner.path]
            binding = file.scopes.top.bindings.get(name)
            new = self.names.final(file, binding) if binding is not None else name
            certain = certain or binding is not None
        elif owner is not None and self.names.is_class(owner):
            new = self.names.member(owner, name)
        if new is None:
            spot = (text.end_lineno or 0, text.end_col_offset or 0, name)
            new = self.slots(self.index.named.get(self.path, {}).get(spot), name, start)
        if new is None and self.names.guess(name) != name:
            guess = self.guess(holder, name, certain)
            if guess is None and certain:
                self.doubt(start, name, f'"{name}"')
            new = guess
        if new is not None:
            self.put(at, new)
