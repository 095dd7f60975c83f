"""Checks that no value fits two schemas at once: then ``oneOf`` means the same as ``anyOf``, which grammars support."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trencadis.server.grammars.schema_keywords import TYPES

MOST_PAIRS = 2_000
MAX_CHECKS = 20_000
_DEPTH = 8

Target = Callable[[str], Any]
"""Returns the schema that a ``$ref`` names."""


def are_all_disjoint(options: Sequence[Any], target: Target, tag: str = "") -> bool:
    """True if every two of ``options`` are known to be disjoint; False also when that cannot be decided.

    Args:
        tag: a property that each option requires, even if it does not list it (OpenAPI's ``discriminator``).
    """
    count = len(options)
    if count * (count - 1) // 2 > MOST_PAIRS:
        return _have_distinct_tag(options, target, tag)
    look = _DisjointChecker(target, tag)
    return all(look.are_disjoint(a, b, _DEPTH) for i, a in enumerate(options) for b in options[i + 1 :])


def _have_distinct_tag(options: Sequence[Any], target: Target, tag: str) -> bool:
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

    def resolve(self, node: Any, depth: int) -> Mapping[str, Any]:
        """Returns a schema as an object, with a bare reference replaced by its target."""
        while isinstance(node, Mapping) and isinstance(node.get("$ref"), str) and depth:
            depth -= 1
            found = self._target(node["$ref"])
            if not isinstance(found, Mapping):
                return {}
            node = {**found, **{k: v for k, v in node.items() if k != "$ref"}}
        return node if isinstance(node, Mapping) else {}

    def list_required(self, node: Mapping[str, Any]) -> list[str]:
        named = node.get("required")
        return [*(named if isinstance(named, list) else []), *([self._tag] if self._tag else [])]

    def list_types(self, node: Mapping[str, Any]) -> set[str]:
        """Returns the types that a schema itself allows; integers count as numbers."""
        named = node.get("type", list(TYPES))
        found = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set(TYPES)
        values = self.list_literals(node)
        if values is not None:
            found &= {_get_type(one) for one in values} | ({"integer"} if "integer" in found else set())
        return {"number" if one == "integer" else one for one in found}

    def list_literals(self, node: Mapping[str, Any]) -> list[Any] | None:
        """Returns the values of ``const`` or ``enum``; None without them."""
        if "const" in node:
            return [node["const"]]
        values = node.get("enum")
        return values if isinstance(values, list) else None

    def list_values(self, node: Any, depth: int) -> set[str] | None:
        """Returns these values as texts, equal if the values are."""
        found = self.list_literals(self.resolve(node, depth))
        return None if found is None else {_get_text(one) for one in found}

    def are_disjoint(self, a: Any, b: Any, depth: int) -> bool:
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

    def _are_branches_disjoint(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        """Returns True if every branch of ``a``, or one part of it, is disjoint from ``b``."""
        for key in ("anyOf", "oneOf"):
            options = a.get(key)
            if isinstance(options, list) and options and all(self.are_disjoint(one, b, depth - 1) for one in options):
                return True
        parts = a.get("allOf")
        return isinstance(parts, list) and any(self.are_disjoint(one, b, depth - 1) for one in parts)

    def _are_objects_disjoint(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        for name in (*self.list_required(a), *self.list_required(b)):
            if self.are_disjoint(self._find_property(a, name), self._find_property(b, name), depth - 1):
                return True
        return False

    def _find_property(self, node: Mapping[str, Any], name: str) -> Any:
        """Returns the schema of a property, if it is directly visible."""
        held = node.get("properties")
        if isinstance(held, Mapping) and name in held:
            return held[name]
        return False if node.get("additionalProperties") is False and not node.get("patternProperties") else {}


def _get_type(value: Any) -> str:
    names: Iterator[tuple[type, str]] = iter(
        ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    )
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def _get_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
