"""How a field of a configuration states its whole flag: help, parser, choices, bounds, variables, other names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST = 2**31 - 1
MOST_BYTES = 2**60
YEAR = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class Bound:
    """From ``least`` to ``most``; ``above`` and ``below``: that end itself is outside."""

    least: float
    most: float
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """False for a NaN too."""
        outside = (self.above and value == self.least) or (self.below and value == self.most)
        return self.least <= value <= self.most and not outside

    @property
    def span(self) -> str:
        """As mathematicians write it: ``[0, 1)``."""
        least, most = (f"{v}" if isinstance(v, int) else f"{v:.16g}" for v in (self.least, self.most))
        return f"{'(' if self.above else '['}{least}, {most}{')' if self.below else ']'}"

    def rule(self, value: float) -> str:
        """What ``value`` breaks."""
        if value <= 0 and (self.least == 1 or (self.least == 0 and self.above and self.most > 1)):
            return "must be positive"
        return f"must be in {self.span}"


COUNT, NOT_NEGATIVE, BYTES = Bound(1, MOST), Bound(0, MOST), Bound(1, MOST_BYTES)
SECONDS, SOME_SECONDS, SHARE = Bound(0, YEAR), Bound(0, YEAR, above=True), Bound(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """What a flag is beside its name, type and default.

    Args:
        kind: the parser, where the type does not name it: bytes, commas, count, json, limits or upper.
        choices: the values there are.
        means: another word for a value -> the value.
        later: a value that other servers take -> why it is refused, and what serves.
        bare: the value of the flag without one, where it may stand so.
        unset: texts that stand for None, beside auto, none and null.
        bound: limits of a number; every numeric flag has one.
        aliases: other names of the flag.
        env: variables that set it, the first wins.
        secret: never printed, and told to no other process.
        hidden: only in ``--help=all``.
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


def opt(default: Any, help: str, **more: Any) -> Any:
    """A field that is also a flag; ``more`` are the arguments of ``Option``."""
    metadata = {"option": Option(help, **more)}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def options(config: Any) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """The fields of a configuration (the class, or a value of it) with what they say."""
    for one in dataclasses.fields(config):
        yield one, one.metadata["option"]
