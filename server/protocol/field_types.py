"""Types of request fields: texts and JSON values that have passed ``json_values``."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from trencadis.core.json_types import JsonObject
from trencadis.server.protocol.json_values import find_fault

T = TypeVar("T")


def _check_json_value(value: T) -> T:
    found = find_fault(value)
    if found is not None:
        raise PydanticCustomError("json_value", "{fault}", {"fault": f"The value holds {found[1]}"})
    return value


Text = Annotated[str, AfterValidator(_check_json_value)]
Object = Annotated[JsonObject, AfterValidator(_check_json_value)]
Objects = Annotated[list[JsonObject], AfterValidator(_check_json_value)]
