"""Values that fit a JSON schema, at random, from hypothesis-jsonschema; and what ``jsonschema`` says of a text."""

from __future__ import annotations

import decimal
import json
import warnings
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture import utils

# Quotients of all that a double can hold have no more digits.
decimal.getcontext().prec = 700


def _more(self: Any) -> bool:
    """The loop of ``many`` as hypothesis had it when hypothesis-jsonschema was written."""
    if not hasattr(self, "_steps"):
        self._steps = iter(self.__enter__())
    try:
        next(self._steps)
    except StopIteration:
        self.__exit__(None)
        return False
    return True


if not hasattr(utils.many, "more"):
    utils.many.more = _more  # type: ignore[attr-defined]


def instances(schema: Any, count: int, number: int) -> list[Any]:
    """``count`` values, fewer where the schema has no more; ``number`` is the seed."""
    from hypothesis_jsonschema import from_schema

    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def collect(value: Any) -> None:
        found.append(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given(from_schema(schema))(collect)()
    return found


def exact(value: Any) -> Any:
    """A JSON value with decimal fractions: ``jsonschema`` divides floats, which rounds."""
    return json.loads(json.dumps(value), parse_float=Decimal)


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    """What ``jsonschema`` makes of a schema, in exact numbers."""
    return jsonschema.Draft202012Validator(exact(schema))


def _number(text: str) -> Decimal | float:
    """An exact number; infinity beyond what decimals reach, as every reader has it."""
    try:
        made = Decimal(text)
    except InvalidOperation:
        return float(text)
    return made if abs(made.adjusted()) < 350 else float(text)


def fits(checks: jsonschema.Draft202012Validator, text: str) -> bool:
    """Whether a text is JSON and fits."""
    return bool(checks.is_valid(json.loads(text, parse_float=_number)))


def damaged(value: Any, turn: int) -> Iterator[Any]:
    """Values near one: something added, dropped or of another type; most of them no longer fit."""
    yield [value] if turn % 2 else {"x": value}
    if isinstance(value, dict):
        yield {**value, "zz": turn}
        for key in list(value)[:3]:
            yield {k: v for k, v in value.items() if k != key}
            for other in (None, "zz", 10**6 + 1, -1, [], {}):
                yield {**value, key: other}
    elif isinstance(value, list):
        yield [*value, None]
        yield value[1:]
    elif isinstance(value, str):
        yield value + "zz"
        yield value[:-1]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value + 0.5
        yield -value
        yield str(value)
