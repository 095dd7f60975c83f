"""Checks every number of a configuration against the bounds of its option."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.flag_options import Bound, options
from trencadis.server.config.config import ServerConfig
from trencadis.server.config.flags import NUMBERS, WHOLE, Flag, get_flag_table

VARIABLE = "environment "
"""Prefix of the source of a value from the environment; the variable's name follows."""


def list_numeric_flags() -> list[Flag]:
    """Returns the flags that take a number."""
    return [flag for flag in get_flag_table().values() if flag.kind in NUMBERS]


def check(config: EngineConfig | ServerConfig, sources: Mapping[str, str] | None = None) -> None:
    """Checks every number of ``config``. ``sources``: as in ``Settings``.

    Raises:
        StartupError: a number is out of bounds; the message names the flag or variable, the value and the rule.
    """
    flags = get_flag_table()
    for field, option in options(config):
        if option.bound is not None:
            _check(flags[field.name], option.bound, getattr(config, field.name), (sources or {}).get(field.name, ""))


def _check(flag: Flag, bound: Bound, value: Any, source: str) -> None:
    if value is None and flag.optional:
        return
    kinds = (int,) if flag.kind in WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, float) and math.isnan(value)):
        kind = "a whole number" if flag.kind in WHOLE else "a number"
        raise StartupError(f"{flag.written} must be {kind}, got {value!r}.")
    if bound.holds(value):
        return
    given = value if isinstance(value, int) else f"{value:g}"
    if source.startswith(VARIABLE):
        raise StartupError(f"{source.removeprefix(VARIABLE)}={given} {bound.rule(value)}.")
    raise StartupError(f"{flag.written} {bound.rule(value)}, got {given}.")
