"""Declares flags as dataclass fields: help text, parser, choices, bounds, environment variables, aliases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

FlagValue: TypeAlias = Any
"""The value of a flag, whose type its ``Option`` and its field define: a scalar, a list, or JSON of kind ``json``."""

MOST = 2**31 - 1
MOST_BYTES = 2**60
YEAR = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class Bound:
    """The interval from ``least`` to ``most``; ``above`` and ``below`` exclude the respective end."""

    least: float
    most: float
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """Returns True if ``value`` lies inside; False for a NaN."""
        outside = (self.above and value == self.least) or (self.below and value == self.most)
        return self.least <= value <= self.most and not outside

    @property
    def span(self) -> str:
        """The interval in mathematical notation: ``[0, 1)``."""
        least, most = (f"{v}" if isinstance(v, int) else f"{v:.16g}" for v in (self.least, self.most))
        return f"{'(' if self.above else '['}{least}, {most}{')' if self.below else ']'}"

    def rule(self, value: float) -> str:
        """Returns the rule that ``value`` violates, for an error message."""
        if value <= 0 and (self.least == 1 or (self.least == 0 and self.above and self.most > 1)):
            return "must be positive"
        return f"must be in {self.span}"


COUNT, NOT_NEGATIVE, BYTES = Bound(1, MOST), Bound(0, MOST), Bound(1, MOST_BYTES)
SECONDS, SOME_SECONDS, SHARE = Bound(0, YEAR), Bound(0, YEAR, above=True), Bound(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """The properties of a flag other than its name, type and default.

    Args:
        kind: the parser, if the type does not determine it: bytes, commas, count, json, limits or upper.
        choices: the valid values.
        means: synonym of a value -> the value.
        later: a value that other servers accept -> why it is refused, and what to use instead.
        bare: the value if the flag is given without one; None: it needs a value.
        unset: texts that mean None, besides auto, none and null.
        bound: limits of a number; every numeric flag has one.
        aliases: other names of the flag.
        env: environment variables that set it; the first one wins.
        secret: never printed, and not passed to other processes.
        hidden: shown only by ``--help=all``.
    """

    help: str
    kind: str = ""
    choices: tuple[str, ...] = ()
    means: Mapping[str, str] = field(default_factory=dict)
    later: Mapping[str, str] = field(default_factory=dict)
    bare: str | None = None
    unset: tuple[str, ...] = ()
    bound: Bound | None = None
    aliases: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    secret: bool = False
    hidden: bool = False


def opt(default: FlagValue, help: str, **more: Any) -> Any:
    """Declares a dataclass field that is also a flag; ``more`` are the arguments of ``Option``."""
    metadata = {"option": Option(help, **more)}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def options(config: Any) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """Yields the fields of a configuration (a class or an instance) with their ``Option``."""
    for one in dataclasses.fields(config):
        yield one, one.metadata["option"]
