"""The table of flags, made from the fields of EngineConfig and ServerConfig, and how a written name is found in it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from dataclasses import dataclass
from typing import Any

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.nearest import nearest
from trencadis.server.config import foreign_flags, legacy, values
from trencadis.server.config.config import ServerConfig

NORMAL = {"dtype": {"half": "float16", "float": "float32"}}
NOTHING = ("auto", "none", "null")


@dataclass(frozen=True, slots=True)
class Flag:
    """One field as a flag; ``kind`` names the parser in ``values.PARSERS``."""

    name: str
    owner: str
    kind: str
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...]
    env: tuple[str, ...]
    secret: bool
    hidden: bool

    @property
    def written(self) -> str:
        """As users write it."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str, where: str = "") -> Any:
        """The value of ``text``; ``where`` names its source in an error.

        Raises:
            StartupError: it cannot be read, or is none of the choices.
        """
        where = where or self.written
        written = text.strip().lower()
        # vLLM's "as long as fits"; elsewhere a -1 is a mistake.
        if self.optional and (written in NOTHING or (written == "-1" and self.name == "max_model_len")):
            return None
        legacy.refuse_value(self.name, text)
        return self.check(values.PARSERS[self.kind](text, where), where)

    def convert(self, value: Any, where: str) -> Any:
        """A YAML value; texts go through ``parse``."""
        if isinstance(value, str):
            return self.parse(value, where)
        if value is None and self.optional:
            return None
        if self.kind == "list":
            return [str(one) for one in value] if isinstance(value, list) else [str(value)]
        if self.kind in ("json", "limits") and isinstance(value, dict):
            return values.check_limits(value, where) if self.kind == "limits" else value
        if isinstance(value, bool) != (self.kind == "bool") or not isinstance(value, bool | int | float):
            raise StartupError(f"{where}: {value!r} does not fit {self.written}.")
        return value if self.kind == "bool" else self.parse(str(value), where)

    def check(self, value: Any, where: str) -> Any:
        """Aliases of a value resolved, choices enforced."""
        value = NORMAL.get(self.name, {}).get(value, value) if isinstance(value, str) else value
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), self.choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StartupError(f"{where}: {value!r} is none of {', '.join(self.choices)}{hint}")
        return value


def _kind(hint: Any, meta: typing.Mapping[str, Any]) -> tuple[str, bool]:
    """The parser's name, and whether None is a value."""
    parts = typing.get_args(hint)
    optional = type(None) in parts
    base = next(p for p in parts if p is not type(None)) if optional else hint
    if "kind" in meta:
        return meta["kind"], optional
    origin = typing.get_origin(base) or base
    return {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "json"}[origin], optional


def _flags(owner: str, config: type) -> typing.Iterator[Flag]:
    hints = typing.get_type_hints(config)
    for f in dataclasses.fields(config):
        kind, optional = _kind(hints[f.name], f.metadata)
        factory = f.default_factory
        default = f.default if factory is dataclasses.MISSING else factory()
        meta = f.metadata
        yield Flag(
            f.name, owner, kind, optional, default, meta["help"], tuple(meta.get("choices", ())),
            tuple(a.lstrip("-").replace("-", "_") for a in meta.get("aliases", ())), tuple(meta.get("env", ())),
            bool(meta.get("secret")), bool(meta.get("hidden")),
        )  # fmt: skip


@functools.cache
def table() -> dict[str, Flag]:
    """All flags by field name, the server's first."""
    every = [*_flags("server", ServerConfig), *_flags("engine", EngineConfig)]
    found = {f.name: f for f in every}
    assert len(found) == len(every), "a field of both configurations"
    return found


@dataclass(frozen=True, slots=True)
class Found:
    """What a written name means: a flag (maybe negated), or a name of ``legacy``, or one of ``SPECIAL``."""

    name: str
    flag: Flag | None = None
    negated: bool = False


SPECIAL = ("help", "config")


@functools.cache
def _names() -> dict[str, Found]:
    """Every name that may be written, without dashes, with underscores."""
    foreign = (*legacy.NO_EFFECT, *legacy.LATER, *legacy.MEANS, *foreign_flags.names())
    names = {name: Found(name) for name in (*foreign, *SPECIAL)}
    for flag in table().values():
        for name in (flag.name, *flag.aliases):
            names[name] = Found(flag.name, flag)
            if flag.kind == "bool":
                names["no_" + name] = Found(flag.name, flag, negated=True)
    for name in foreign:
        if name in foreign_flags.names() or not legacy.values_of(name):
            names.setdefault("no_" + name, Found(name, negated=True))
    for short, name in legacy.SHORT.items():
        names.setdefault(short, names[name])
    return names


def lookup(written: str) -> Found:
    """The flag of ``--some-name``, ``--some_name``, an unambiguous prefix, or a short option.

    Raises:
        StartupError: unknown (the line names the flag that it misspells) or ambiguous.
    """
    names = _names()
    name = written.lstrip("-").replace("-", "_")
    if name in names:
        return names[name]
    hits = {found for key, found in names.items() if key.startswith(name) and len(name) > 1}
    own = {found for found in hits if found.flag is not None} or hits
    if len(own) == 1:
        return own.pop()
    if own:
        some = ", ".join(sorted(_written(f) for f in own)[:5])
        raise StartupError(f"{written} is ambiguous: {some}.")
    near = nearest(name, (key for key, found in names.items() if found.flag)) or nearest(name, legacy.LATER)
    hint = f"; did you mean {_written(names[near])}?" if near else "; see --help."
    raise StartupError(f"unknown flag {written}{hint}")


def _written(found: Found) -> str:
    return "--" + ("no-" if found.negated else "") + found.name.replace("_", "-")
