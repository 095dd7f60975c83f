"""Rewrites schemas with fewer keywords: those of draft 2020-12 that have a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.server.grammars.regex_translation import escaped
from trencadis.server.grammars.schema_keywords import ANNOTATIONS

IN_PLACE = ("enum", "const", "allOf", "anyOf", "oneOf", "$ref")
"""Keywords that apply a schema to the same value."""


def rewrite_schema(node: dict[str, Any]) -> dict[str, Any]:
    """Returns an equal schema without older spellings; ``node`` itself if it has none."""
    for keyword, rewrite in _REWRITES.items():
        if keyword in node:
            node = rewrite(node)
    return node


def _remove_unneeded(node: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in node.items() if k not in keys}


def _rewrite_items(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrites a list under ``items`` and the schema under ``additionalItems``, as before draft 2020."""
    if not isinstance(node["items"], list) or "prefixItems" in node:
        return _remove_unneeded(node, "additionalItems")
    rest = {"items": node["additionalItems"]} if "additionalItems" in node else {}
    # At the same position, since the library looks at neighbours.
    made: dict[str, Any] = {}
    for key, value in node.items():
        made |= {"prefixItems": value, **rest} if key == "items" else {} if key == "additionalItems" else {key: value}
    return made


def _rewrite_exclusive_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrites draft 4's ``exclusiveMinimum: true``, which modifies ``minimum``."""
    for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        flag = node.get(keyword)
        if isinstance(flag, bool):
            moved = {keyword: node[bound]} if flag and bound in node else {}
            node = {**_remove_unneeded(node, keyword, *([bound] if moved else [])), **moved}
    return node


def _rewrite_property_names(node: dict[str, Any]) -> dict[str, Any]:
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


def _rewrite_unevaluated(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrites unevaluated keywords as additional ones, if nothing else applies to the same value."""
    if any(key in node for key in IN_PLACE):
        return node
    for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in node:
            node = {**({plain: node[keyword]} if plain not in node else {}), **_remove_unneeded(node, keyword)}
    return node


def _move_one_of(node: dict[str, Any]) -> dict[str, Any]:
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
