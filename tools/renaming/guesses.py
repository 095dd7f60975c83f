"""What an attribute of an object of unknown type means: by a map, or by all that is asked of the object."""

from __future__ import annotations

import ast
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cached_property

from tools.renaming.names import Names
from tools.renaming.project import File, Symbol
from tools.renaming.scopes import Binding

Key = tuple[Binding, str]


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
