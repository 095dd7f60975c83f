"""Former names that plug-ins of other packages may still import, and their current names.

If a plug-in fails because of such a name, the start ends with one line that gives the current name.
"""

from __future__ import annotations

import ast
import linecache
import re
import tomllib
import traceback
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class RenamedNames(NamedTuple):
    """The tables of core/renamed_plugin_api.toml: each maps former to current names.

    Attributes:
        modules: modules, without ``trencadis.``.
        moved: names with their former modules -> the modules that have them now.
        names: classes, functions and constants of any of these modules.
        members: current class name -> its methods, attributes and constructor arguments.
    """

    modules: dict[str, str]
    moved: dict[str, str]
    names: dict[str, str]
    members: dict[str, dict[str, str]]


@cache
def read_renamed_names() -> RenamedNames:
    """Reads the tables; they are needed only when a plug-in fails or brings a parser."""
    return RenamedNames(**tomllib.loads(Path(__file__).with_name("renamed_plugin_api.toml").read_text("utf-8")))


def find_successors(error: BaseException) -> str:
    """Returns "; OLD is called NEW now" for each renamed name that ``error`` is about; "" if there is none.

    Args:
        error: what importing or calling a plug-in raised: ImportError, AttributeError or TypeError.
    """
    if isinstance(error, ImportError):
        pairs = [*_renamed_imports(error)]
    elif isinstance(error, AttributeError):
        pairs = [*_renamed_attribute(error)]
    elif isinstance(error, TypeError):
        pairs = [*_renamed_keyword(str(error))]
    else:
        pairs = []
    return "".join(f"; {old} is called {new} now" for old, new in dict.fromkeys(pairs))


def find_old_members(subject: type) -> str:
    """Returns the same as ``find_successors``, for methods and attributes that a plug-in's class defines by former
    names.
    """
    pairs = [
        (f"{subject.__name__}.{old}", new)
        for base in subject.__mro__[1:]
        for old, new in read_renamed_names().members.get(base.__name__, {}).items()
        if old in vars(subject) and base.__module__.startswith("trencadis.")
    ]
    return "".join(f"; {old} is called {new} now" for old, new in dict.fromkeys(pairs))


def _renamed_imports(error: ImportError) -> Iterator[tuple[str, str]]:
    """Yields (old, new) for the module and the names of the failing import statement."""
    statement = _failing_import(error)
    module = (statement.module if isinstance(statement, ast.ImportFrom) else None) or error.name or ""
    inside = module.removeprefix("trencadis.")
    if not module.startswith("trencadis."):
        return
    if current := _find_module(inside):
        yield module, f"trencadis.{current}"
    renamed = read_renamed_names()
    for alias in statement.names if isinstance(statement, ast.ImportFrom) else ():
        if alias.name in renamed.names:
            yield alias.name, renamed.names[alias.name]
        elif f"{inside}.{alias.name}" in renamed.moved:
            yield f"{module}.{alias.name}", f"trencadis.{renamed.moved[f'{inside}.{alias.name}']}.{alias.name}"
        elif f"{inside}.{alias.name}" in renamed.modules:
            yield f"{module}.{alias.name}", f"trencadis.{renamed.modules[f'{inside}.{alias.name}']}"


def _find_module(former: str) -> str:
    """Returns the current name of a former module, also if only its folder was renamed; "" if there is none."""
    modules = read_renamed_names().modules
    if former in modules:
        return modules[former]
    folder, _, name = former.rpartition(".")
    package = find_spec(f"trencadis.{modules[folder]}") if folder in modules else None
    if package is None or not package.submodule_search_locations:
        return ""
    current = f"{modules[folder]}.{name}"
    return current if find_spec(f"trencadis.{current}") is not None else ""


def _failing_import(error: ImportError) -> ast.stmt | None:
    """Returns the import statement that raised ``error``, read from its source; None if it cannot be found."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    if not frames or frames[-1].lineno is None:
        return None
    frame = frames[-1]
    first, last = frame.lineno or 0, getattr(frame, "end_lineno", None) or frame.lineno or 0
    lines = [linecache.getline(frame.filename, n).strip() for n in range(first, last + 1)]
    try:
        body = ast.parse(" ".join(lines)).body
    except SyntaxError:
        return None
    return body[0] if body else None


def _renamed_attribute(error: AttributeError) -> Iterator[tuple[str, str]]:
    """Yields (old, new) for a former attribute of a module, a class or an instance of this package."""
    name, owner = error.name or "", error.obj
    module = str(getattr(owner, "__name__", ""))
    modules, moved, names, members = read_renamed_names()
    if module.startswith("trencadis."):
        inside = f"{module}.{name}".removeprefix("trencadis.")
        if inside in modules:
            yield f"trencadis.{inside}", f"trencadis.{modules[inside]}"
        elif inside in moved:
            yield f"{module}.{name}", f"trencadis.{moved[inside]}.{name}"
        elif name in names:
            yield name, names[name]
        return
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if name in members.get(base.__name__, {}) and base.__module__.startswith("trencadis."):
            yield f"{base.__name__}.{name}", members[base.__name__][name]


def _renamed_keyword(message: str) -> Iterator[tuple[str, str]]:
    """Yields (old, new) for a field that a constructor of this package no longer accepts."""
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", message)
    members = read_renamed_names().members
    if found is not None and found[2] in members.get(found[1], {}):
        yield f"{found[1]}({found[2]}=)", members[found[1]][found[2]]
