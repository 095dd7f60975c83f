"""Keywords of JSON Schema: those that grammars enforce, those without effect on values, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
SAFE = 2**53 - 1
"""Largest integer that is exact in every JSON reader, and in the library."""
ANNOTATIONS = frozenset(
    {"$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "$vocabulary", "$dynamicAnchor",
     "$recursiveAnchor", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "discriminator"}
)  # fmt: skip
"""Keywords that do not restrict values."""
REFUSED = frozenset(
    {"not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains", "unevaluatedItems",
     "unevaluatedProperties", "propertyNames", "$dynamicRef", "$recursiveRef", "uniqueItems", "extends", "disallow",
     "divisibleBy"}
)  # fmt: skip
"""Keywords of some draft that restrict values and have no grammar here, except as in ``has_no_effect``."""
LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
FORMATS = {
    **{name: name for name in ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")},
    "uri": "uri",
    "url": "uri",
    "iri": "uri",
    "uri-reference": "uri",
    "iri-reference": "uri",
    "uri-template": "uri",
    "idn-email": "email",
    "idn-hostname": "hostname",
}
"""Formats that are enforced -> the library's name of the format, or of one with a subset of its values."""
PATTERNS = {
    "json-pointer": r"^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
}
FREE_FORMATS = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double", "decimal", "binary",
     "byte", "password", "path", "file-path", "directory-path", "textarea", "markdown", "html"}
)  # fmt: skip
"""Formats that describe how a value is stored or shown, without restricting it."""


def has_no_effect(keyword: str, value: Any, node: Mapping[str, Any]) -> bool:
    """Returns True if a keyword of ``REFUSED`` restricts nothing in ``node``."""
    if keyword == "uniqueItems":
        return value is False
    if keyword in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        return value is True or value in ({}, {"type": "string"} if keyword == "propertyNames" else {})
    if keyword == "if":
        return "then" not in node and "else" not in node
    if keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        return not value
    return False
