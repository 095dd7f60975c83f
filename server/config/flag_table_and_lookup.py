"""The table of flags, made from the fields of EngineConfig and ServerConfig, and the look-up of flag names."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import typing
from dataclasses import dataclass
from typing import Any

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError, suggest_name
from trencadis.core.flag_declaration import FlagValue, Option, options
from trencadis.server.config import value_parsers
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.config.vllm_flag_and_env_table import ROWS, SHORT

UNSET = ("auto", "none", "null")
"""Texts that mean None for flags that accept it."""
WHOLE = ("int", "count", "bytes")
NUMBERS = (*WHOLE, "float", "amount")
LISTS = ("list", "commas")
"""Kinds that take any number of words; with commas, each word may have several values."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Flag(Option):
    """A field of a configuration as a flag; ``kind`` names its parser in ``value_parsers.PARSERS``."""

    name: str
    owner: str
    optional: bool
    default: FlagValue

    @property
    def written(self) -> str:
        """The flag as users write it."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str, where: str = "") -> FlagValue:
        """Parses ``text``; ``where`` names its source in an error.

        Raises:
            StartupError: the text cannot be parsed, or is not one of the choices.
        """
        where = where or self.written
        written = text.strip().lower()
        if self.optional and written in (*UNSET, *self.unset):
            return None
        if written in self.later:
            raise StartupError(f"{self.written} {text} is refused: {self.later[written]}.")
        return self.check(value_parsers.PARSERS[self.kind](text, where), where)

    def convert(self, value: FlagValue, where: str) -> FlagValue:
        """Converts a YAML or Python value; texts go through ``parse``."""
        if isinstance(value, str):
            return self.parse(value, where)
        if value is None and self.optional:
            return None
        if self.kind in LISTS:
            return [_as_word(one) for one in value] if isinstance(value, list) else [_as_word(value)]
        if self.kind in ("json", "limits") and isinstance(value, dict):
            return value_parsers.check_limits(value, where) if self.kind == "limits" else value
        if isinstance(value, bool) != (self.kind == "bool") or not isinstance(value, bool | int | float):
            raise StartupError(f"{where}: {value!r} does not fit {self.written}.")
        return value if self.kind == "bool" else self.parse(str(value), where)

    def check(self, value: FlagValue, where: str) -> FlagValue:
        """Resolves aliases of choices; raises StartupError for a value that is not one of the choices."""
        value = self.means.get(value, value) if isinstance(value, str) else value
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), self.choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StartupError(f"{where}: {value!r} is not one of {', '.join(filter(None, self.choices))}{hint}")
        return value


def _get_kind(hint: Any, named: str) -> tuple[str, bool]:
    """Returns the parser's name (``named``, else by type), and True if None is a value."""
    parts = typing.get_args(hint)
    optional = type(None) in parts
    base = next(p for p in parts if p is not type(None)) if optional else hint
    origin = typing.get_origin(base) or base
    kinds = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "json"}
    return named or kinds[origin], optional


def _make_flags(owner: str, config: type) -> typing.Iterator[Flag]:
    hints = typing.get_type_hints(config)
    for field, option in options(config):
        kind, optional = _get_kind(hints[field.name], option.kind)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        said = {one.name: getattr(option, one.name) for one in dataclasses.fields(Option)} | {"kind": kind}
        yield Flag(name=field.name, owner=owner, optional=optional, default=default, **said)


def _as_word(value: FlagValue) -> str:
    """Returns a YAML value as the word that a command line would have."""
    return json.dumps(value) if isinstance(value, dict) else str(value)


@functools.cache
def get_flag_table() -> dict[str, Flag]:
    """Returns all flags by field name, the server's first."""
    every = [*_make_flags("server", ServerConfig), *_make_flags("engine", EngineConfig)]
    found = {f.name: f for f in every}
    assert len(found) == len(every), "a field of both configurations"
    return found


@functools.cache
def get_flag_variables() -> dict[str, Flag]:
    """Returns the environment variables that set a flag, with the flags."""
    return {name: flag for flag in get_flag_table().values() for name in flag.env}


@dataclass(frozen=True, slots=True)
class Match:
    """Result of looking up a name: a flag (maybe negated), a row of ``vllm_flag_and_env_table``, or one of
    ``SPECIAL``.
    """

    name: str
    flag: Flag | None = None
    negated: bool = False


SPECIAL = ("help", "config")


@functools.cache
def _get_written_names() -> dict[str, Match]:
    """Returns every name that users may write, without dashes and with underscores."""
    names = {name: Match(name) for name in (*ROWS, *SPECIAL)}
    for row in ROWS.values():
        if row.kind == "bool":
            names["no_" + row.name] = Match(row.name, negated=True)
    for flag in get_flag_table().values():
        for name in (flag.name, *flag.aliases):
            names[name] = Match(flag.name, flag)
            if flag.kind == "bool":
                names["no_" + name] = Match(flag.name, flag, negated=True)
    for short, name in SHORT.items():
        names.setdefault(short, names[name])
    return names


def find_flag(written: str) -> Match:
    """Finds the flag of ``--some-name``, ``--some_name``, an unambiguous prefix, or a short option.

    Raises:
        StartupError: the name is unknown (the message suggests the nearest flag) or ambiguous.
    """
    names = _get_written_names()
    name = written.lstrip("-").replace("-", "_")
    if name in names:
        return names[name]
    hits = {found for key, found in names.items() if key.startswith(name) and len(name) > 1}
    if len(hits) == 1:
        return hits.pop()
    if hits:
        ordered = sorted(hits, key=lambda found: (found.flag is None, _format_flag(found)))
        some = ", ".join(_format_flag(f) for f in ordered[:5])
        raise StartupError(f"{written} is ambiguous: {some}.")
    # vLLM's flags are only suggested with the same number of words: --max-shards need not be about experts.
    near = suggest_name(name, (key for key, found in names.items() if found.flag or key.count("_") == name.count("_")))
    hint = f"; did you mean {_format_flag(names[near])}?" if near else "; see --help."
    raise StartupError(f"unknown flag {written}{hint}")


def _format_flag(found: Match) -> str:
    return "--" + ("no-" if found.negated else "") + found.name.replace("_", "-")
