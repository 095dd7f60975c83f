"""New names that would be bound twice, or that another binding would catch."""

from __future__ import annotations

from tools.renaming.index import Index, Slot
from tools.renaming.names import Names
from tools.renaming.project import File
from tools.renaming.scopes import Binding, Scope


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
