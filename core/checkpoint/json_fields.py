"""Typed access to the values of a checkpoint's JSON files; errors name file, key and value. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.operator_files import read_regular_text

MOST = 2**31 - 1
"""Upper limit of any count: the largest int32."""


class Missing:
    """The type of the marker for "no default"."""


NO_DEFAULT = Missing()


def read_json(path: Path) -> JsonObject | None:
    """Returns the JSON object in ``path``, or None if there is no such file.

    Raises:
        StartupError: the file cannot be read or holds no JSON object.
    """
    try:
        value = json.loads(read_regular_text(path, "utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        line = str(error).splitlines()[0]
        raise StartupError(f"{path} is no valid JSON: {line[:120]}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object, but {format_value(value)}")
    return value


def format_value(value: Json) -> str:
    """Formats a value for an error message, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


class JsonFields:
    """The values of one JSON object.

    Args:
        values: key -> value. A null counts as a value, which most readers refuse.
        where: the file, for messages.
        prefix: path of the object inside the file, with a dot at the end.
        hint: advice that is appended to errors.
    """

    def __init__(self, values: JsonMapping, where: Path | str, prefix: str = "", hint: str = "") -> None:
        self.values, self.where, self.prefix, self.hint = values, where, prefix, hint
        self._read: set[str] = set()

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raises StartupError with the key, its value and ``rule``."""
        hint = f" ({self.hint})" if self.hint else ""
        if key not in self.values:
            raise StartupError(f"{self.where}: {self.prefix}{key} is missing; {rule}{hint}")
        raise StartupError(f"{self.where}: {self.prefix}{key} is {format_value(self.values[key])}; {rule}{hint}")

    def with_defaults(self, defaults: JsonMapping) -> JsonFields:
        """Returns these fields with ``defaults`` for missing keys; keys read from the copy count as read here as
        well.
        """
        return self._sharing({**defaults, **self.values})

    def with_values(self, **values: Json) -> JsonFields:
        """Returns these fields with some values replaced; keys read from the copy count as read here as well."""
        return self._sharing({**self.values, **values})

    def _sharing(self, values: JsonMapping) -> JsonFields:
        made = JsonFields(values, self.where, self.prefix, self.hint)
        made._read = self._read
        return made

    def unread(self) -> set[str]:
        """Returns the keys that have not been read."""
        return set(self.values) - self._read

    def _value(self, key: str, default: Json = None) -> Json:
        self._read.add(key)
        return self.values.get(key, default)

    def is_given(self, key: str) -> bool:
        """Returns True if the key has a value other than null."""
        self._read.add(key)
        return self.values.get(key) is not None

    def within(self, key: str, default: JsonMapping | None = None) -> JsonFields:
        """Returns the object under ``key``; a null counts as an empty one."""
        value = self._value(key)
        if value is None:
            value = default or {}
        if not isinstance(value, dict):
            self.refuse(key, "it must be an object")
        return JsonFields(value, self.where, f"{self.prefix}{key}.", self.hint)

    def integer(self, key: str, least: int = 1, most: int = MOST, default: int | Missing = NO_DEFAULT) -> int:
        """Returns a whole number between ``least`` and ``most``; refuses any other value."""
        rule = f"it must be a whole number from {least} to {most}"
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(key, rule)
        return value

    def number(
        self, key: str, least: float, most: float, default: float | Missing = NO_DEFAULT, above: bool = False
    ) -> float:
        """Returns a finite number from ``least`` (excluded if ``above``) to ``most``; refuses any other value."""
        begin = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"
        value = self._value(key, default)
        # A NaN fails every comparison.
        good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        if not good or (above and value == least) or not math.isfinite(value):
            self.refuse(key, f"it must be a number {begin}")
        return float(value)

    def boolean(self, key: str, default: bool | Missing = NO_DEFAULT) -> bool:
        """Returns true or false; refuses any other value."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def integers(self, key: str, least: int = 0, most: int = MOST, length: int | None = None) -> tuple[int, ...]:
        """Returns a list of whole numbers between ``least`` and ``most``, of ``length`` entries if that is given."""
        value = self._value(key)
        count = f"{length} whole numbers" if length is not None else "whole numbers"
        rule = f"it must be a list of {count} from {least} to {most}"
        if not isinstance(value, list) or (length is not None and len(value) != length):
            self.refuse(key, rule)
        if not all(isinstance(one, int) and not isinstance(one, bool) and least <= one <= most for one in value):
            self.refuse(key, rule)
        return tuple(value)

    def numbers(self, key: str, length: int, above: float, most: float) -> tuple[float, ...]:
        """Returns a list of ``length`` finite numbers above ``above`` and at most ``most``."""
        value = self._value(key)
        good = isinstance(value, list) and len(value) == length
        good = good and all(isinstance(n, int | float) and not isinstance(n, bool) and above < n <= most for n in value)
        if not good:
            self.refuse(key, f"it must be a list of {length} numbers above {above:g} and at most {most:g}")
        return tuple(float(n) for n in value)

    def only(self, key: str, implemented: Sequence[Json], default: Json = NO_DEFAULT) -> None:
        """Raises StartupError unless the value is one of ``implemented``; the types must be equal as well."""
        value = self._value(key, default)
        if not any(type(value) is type(one) and value == one for one in implemented):
            self.refuse(key, f"implemented: {', '.join(format_value(one) for one in implemented)}")
