"""Names for the values that JSON can express. Their shape is unknown until it is checked, so they all are ``Any``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""Any JSON value: None, bool, int, float, str, a list of values, or an object."""

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object. The function that gets one may change it."""

JsonMapping: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""
