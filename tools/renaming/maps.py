"""Rename maps: TOML files with the old and the new names of files, definitions, parameters, variables and words."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLES = ("files", "symbols", "params", "locals", "words", "uses", "c_names")
ENTRY = re.compile(r"(?P<path>[^:]+)::(?P<name>[\w.<>*]+)(?:\((?P<param>\w+)\))?")


@dataclass
class Maps:
    """All maps as one; every table has its entries by key. ``problems`` are entries that contradict each other."""

    files: dict[str, str] = field(default_factory=dict)
    symbols: dict[tuple[str, str], str] = field(default_factory=dict)
    params: dict[tuple[str, str, str], str] = field(default_factory=dict)
    locals: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    words: dict[str, dict[str, str]] = field(default_factory=dict)
    uses: dict[str, dict[str, str]] = field(default_factory=dict)
    c_names: dict[str, str] = field(default_factory=dict)
    origin: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, table: dict[Any, str], key: Any, new: str, origin: str) -> None:
        """Adds an entry; a second one with another name is a problem."""
        if key in table and table[key] != new:
            self.problems.append(f"{origin}: {key} -> {new}, but {self.origin.get(_key(key))} says {table[key]}")
        table[key] = new
        self.origin[_key(key)] = origin


def _key(key: Any) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def read_maps(paths: Iterable[Path]) -> Maps:
    """Reads maps; raises tomllib.TOMLDecodeError with the file's name in it."""
    maps = Maps()
    for path in paths:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as e:
            maps.problems.append(f"{path.name}: {e}")
            continue
        maps.problems += [f"{path.name}: unknown table [{t}]" for t in tables if t not in TABLES]
        _add(maps, tables, path.name)
    return maps


def _add(maps: Maps, tables: dict[str, Any], origin: str) -> None:
    for old, new in tables.get("files", {}).items():
        if old != new:
            maps.put(maps.files, old, new, origin)
    for table in ("symbols", "params"):
        for text, new in tables.get(table, {}).items():
            entry = ENTRY.fullmatch(text)
            if entry is None or (table == "params") != (entry["param"] is not None) or not str(new).isidentifier():
                maps.problems.append(f"{origin}: [{table}] {text} = {new!r} is not of the form")
            elif table == "symbols":
                maps.put(maps.symbols, (entry["path"], _plain(entry["name"])), new, origin)
            else:
                maps.put(maps.params, (entry["path"], _plain(entry["name"]), entry["param"]), new, origin)
    _add_nested(maps, tables, origin)
    for old, new in tables.get("c_names", {}).items():
        maps.put(maps.c_names, old, new, origin)


def _add_nested(maps: Maps, tables: dict[str, Any], origin: str) -> None:
    for text, names in tables.get("locals", {}).items():
        entry = ENTRY.fullmatch(text)
        if entry is None or not isinstance(names, dict):
            maps.problems.append(f"{origin}: [locals] {text} is not of the form")
            continue
        held = maps.locals.setdefault((entry["path"], _plain(entry["name"])), {})
        for old, new in names.items():
            if held.get(old, new) != new:
                maps.problems.append(f"{origin}: [locals] {text} {old} -> {new}, elsewhere {held[old]}")
            held[old] = new
    for kind, into in (("words", maps.words), ("uses", maps.uses)):
        for glob, words in tables.get(kind, {}).items():
            held = into.setdefault(glob, {})
            for old, new in words.items():
                if held.get(old, new) != new:
                    maps.problems.append(f"{origin}: [{kind}] {glob} {old!r} -> {new!r}, elsewhere {held[old]!r}")
                held[old] = new


def _plain(name: str) -> str:
    return name.replace("<locals>.", "")
