"""Rewrites schemas with fewer keywords: those of draft 2020-12 that have a grammar.

Keywords of JSON Schema: those that grammars enforce, those without effect on values, and those that are refused.

Checks that no value fits two schemas at once: then ``oneOf`` means the same as ``anyOf``, which grammars support.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.server.grammars.regex_translation import escaped

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


def has_no_effect(keyword: str, value: Json, node: JsonMapping) -> bool:
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


IN_PLACE = ("enum", "const", "allOf", "anyOf", "oneOf", "$ref")
"""Keywords that apply a schema to the same value."""


def rewrite_schema(node: JsonObject) -> JsonObject:
    """Returns an equal schema without older spellings; ``node`` itself if it has none."""
    for keyword, rewrite in _REWRITES.items():
        if keyword in node:
            node = rewrite(node)
    return node


def _remove_unneeded(node: JsonMapping, *keys: str) -> JsonObject:
    return {k: v for k, v in node.items() if k not in keys}


def _rewrite_items(node: JsonObject) -> JsonObject:
    """Rewrites a list under ``items`` and the schema under ``additionalItems``, as before draft 2020."""
    if not isinstance(node["items"], list) or "prefixItems" in node:
        return _remove_unneeded(node, "additionalItems")
    rest = {"items": node["additionalItems"]} if "additionalItems" in node else {}
    # At the same position, since the library looks at neighbours.
    made: JsonObject = {}
    for key, value in node.items():
        made |= {"prefixItems": value, **rest} if key == "items" else {} if key == "additionalItems" else {key: value}
    return made


def _rewrite_exclusive_bounds(node: JsonObject) -> JsonObject:
    """Rewrites draft 4's ``exclusiveMinimum: true``, which modifies ``minimum``."""
    for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        flag = node.get(keyword)
        if isinstance(flag, bool):
            moved = {keyword: node[bound]} if flag and bound in node else {}
            node = {**_remove_unneeded(node, keyword, *([bound] if moved else [])), **moved}
    return node


def _rewrite_property_names(node: JsonObject) -> JsonObject:
    """Rewrites ``propertyNames`` with a list of names or a pattern as a pattern of properties."""
    value = node["propertyNames"]
    if not isinstance(value, Mapping) or any(k in node for k in ("properties", "patternProperties", *IN_PLACE)):
        return node
    says = {k: v for k, v in value.items() if k not in ANNOTATIONS and (k, v) != ("type", "string")}
    names = says.get("enum", [says["const"]] if "const" in says else None)
    if set(says) <= {"enum", "const"} and isinstance(names, list) and all(isinstance(n, str) for n in names):
        pattern = f"^({'|'.join(escaped(n) for n in names)})$"
    elif set(says) == {"pattern"} and isinstance(says["pattern"], str):
        pattern = says["pattern"]
    else:
        return node
    rest = node.get("additionalProperties", True)
    return {
        **_remove_unneeded(node, "propertyNames", "additionalProperties"),
        "patternProperties": {pattern: rest},
        "additionalProperties": False,
    }


def _rewrite_unevaluated(node: JsonObject) -> JsonObject:
    """Rewrites unevaluated keywords as additional ones, if nothing else applies to the same value."""
    if any(key in node for key in IN_PLACE):
        return node
    for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in node:
            node = {**({plain: node[keyword]} if plain not in node else {}), **_remove_unneeded(node, keyword)}
    return node


def _move_one_of(node: JsonObject) -> JsonObject:
    """Moves an existing ``anyOf`` to ``allOf``, since ``oneOf`` becomes ``anyOf`` later."""
    if "anyOf" not in node:
        return node
    every = node.get("allOf", [])
    return {
        **_remove_unneeded(node, "oneOf", "allOf"),
        "allOf": [*(every if isinstance(every, list) else []), {"oneOf": node["oneOf"]}],
    }


_REWRITES = {
    "items": _rewrite_items,
    "exclusiveMinimum": _rewrite_exclusive_bounds,
    "exclusiveMaximum": _rewrite_exclusive_bounds,
    "propertyNames": _rewrite_property_names,
    "unevaluatedProperties": _rewrite_unevaluated,
    "unevaluatedItems": _rewrite_unevaluated,
    "oneOf": _move_one_of,
}


MOST_PAIRS = 2_000
MAX_CHECKS = 20_000
_DEPTH = 8

Target = Callable[[str], Json]
"""Returns the schema that a ``$ref`` names."""


def are_all_disjoint(options: Sequence[Json], target: Target, tag: str = "") -> bool:
    """True if every two of ``options`` are known to be disjoint; False also when that cannot be decided.

    Args:
        tag: a property that each option requires, even if it does not list it (OpenAPI's ``discriminator``).
    """
    count = len(options)
    if count * (count - 1) // 2 > MOST_PAIRS:
        return _have_distinct_tag(options, target, tag)
    look = _DisjointChecker(target, tag)
    return all(look.are_disjoint(a, b, _DEPTH) for i, a in enumerate(options) for b in options[i + 1 :])


def _have_distinct_tag(options: Sequence[Json], target: Target, tag: str) -> bool:
    """Returns True if one required property has different values in all options."""
    look = _DisjointChecker(target, tag)
    first = look.resolve(options[0], _DEPTH)
    for name in look.list_required(first):
        seen: set[str] = set()
        for option in options:
            node = look.resolve(option, _DEPTH)
            held = node.get("properties")
            values = look.list_values(held.get(name), _DEPTH) if isinstance(held, Mapping) else None
            if values is None or name not in look.list_required(node) or look.list_types(node) != {"object"}:
                break
            if not seen.isdisjoint(values):
                break
            seen |= values
        else:
            return True
    return False


class _DisjointChecker:
    def __init__(self, target: Target, tag: str) -> None:
        self._target, self._tag, self._left = target, tag, MAX_CHECKS

    def resolve(self, node: Json, depth: int) -> JsonMapping:
        """Returns a schema as an object, with a bare reference replaced by its target."""
        while isinstance(node, Mapping) and isinstance(node.get("$ref"), str) and depth:
            depth -= 1
            found = self._target(node["$ref"])
            if not isinstance(found, Mapping):
                return {}
            node = {**found, **{k: v for k, v in node.items() if k != "$ref"}}
        return node if isinstance(node, Mapping) else {}

    def list_required(self, node: JsonMapping) -> list[str]:
        named = node.get("required")
        return [*(named if isinstance(named, list) else []), *([self._tag] if self._tag else [])]

    def list_types(self, node: JsonMapping) -> set[str]:
        """Returns the types that a schema itself allows; integers count as numbers."""
        named = node.get("type", list(TYPES))
        found = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set(TYPES)
        values = self.list_literals(node)
        if values is not None:
            found &= {_get_type(one) for one in values} | ({"integer"} if "integer" in found else set())
        return {"number" if one == "integer" else one for one in found}

    def list_literals(self, node: JsonMapping) -> list[Json] | None:
        """Returns the values of ``const`` or ``enum``; None without them."""
        if "const" in node:
            return [node["const"]]
        values = node.get("enum")
        return values if isinstance(values, list) else None

    def list_values(self, node: Json, depth: int) -> set[str] | None:
        """Returns these values as texts, equal if the values are."""
        found = self.list_literals(self.resolve(node, depth))
        return None if found is None else {_get_text(one) for one in found}

    def are_disjoint(self, a: Json, b: Json, depth: int) -> bool:
        self._left -= 1
        if a is False or b is False:
            return True
        if not depth or self._left < 0:
            return False
        a, b = self.resolve(a, depth), self.resolve(b, depth)
        first, second = self.list_values(a, depth), self.list_values(b, depth)
        if first is not None and second is not None:
            return first.isdisjoint(second)
        types = self.list_types(a) & self.list_types(b)
        if not types or self._are_branches_disjoint(a, b, depth) or self._are_branches_disjoint(b, a, depth):
            return True
        return types == {"object"} and self._are_objects_disjoint(a, b, depth)

    def _are_branches_disjoint(self, a: JsonMapping, b: JsonMapping, depth: int) -> bool:
        """Returns True if every branch of ``a``, or one part of it, is disjoint from ``b``."""
        for key in ("anyOf", "oneOf"):
            options = a.get(key)
            if isinstance(options, list) and options and all(self.are_disjoint(one, b, depth - 1) for one in options):
                return True
        parts = a.get("allOf")
        return isinstance(parts, list) and any(self.are_disjoint(one, b, depth - 1) for one in parts)

    def _are_objects_disjoint(self, a: JsonMapping, b: JsonMapping, depth: int) -> bool:
        for name in (*self.list_required(a), *self.list_required(b)):
            if self.are_disjoint(self._find_property(a, name), self._find_property(b, name), depth - 1):
                return True
        return False

    def _find_property(self, node: JsonMapping, name: str) -> Json:
        """Returns the schema of a property, if it is directly visible."""
        held = node.get("properties")
        if isinstance(held, Mapping) and name in held:
            return held[name]
        return False if node.get("additionalProperties") is False and not node.get("patternProperties") else {}


def _get_type(value: Json) -> str:
    names: Iterator[tuple[type, str]] = iter(
        ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    )
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def _get_text(value: Json) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
