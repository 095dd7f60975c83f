"""Normalises JSON schemas for llguidance: each keyword is enforced by the grammar, or is an error that names it.

The library itself ignores keywords of no draft, takes options from a schema (``x-guidance``), rounds numbers to
float64,
ignores some ``additionalItems``, and follows references to any depth on the stack. The result here has one
dialect (2020-12), one place for referenced schemas, no annotations, and at most ``LEVELS`` levels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from urllib.parse import unquote

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.grammars.regex_translation import translate_regex
from trencadis.server.grammars.schema_rewrite_and_one_of_disjointness import (
    ANNOTATIONS,
    BOUNDS,
    FORMATS,
    FREE_FORMATS,
    IN_PLACE,
    LENGTHS,
    PATTERNS,
    REFUSED,
    SAFE,
    TYPES,
    are_all_disjoint,
    has_no_effect,
    rewrite_schema,
)

LEVELS = 150
"""Maximum depth of schemas within one another, including references."""
MOST_SCHEMAS = 20_000
Schema = JsonObject | bool


def normalise_schema(schema: Json, where: str, closed: bool = False) -> Schema:
    """Returns a user's schema in the form that the library takes.

    Args:
        where: JSON path of the schema, for errors.
        closed: True if objects that list properties must have no others by default.

    Raises:
        BadRequest: a keyword is wrong or cannot be enforced; ``param`` is its path.
    """
    return SchemaNormaliser(schema, where, closed).read()


class SchemaNormaliser:
    """Reads one schema document; references are followed in the library's order."""

    def __init__(self, root: Json, where: str, closed: bool = False) -> None:
        self.root, self.where, self.closed = root, where, closed
        self._names: dict[str, str] = {"#": "#"}
        self._defs: dict[str, Schema] = {}
        self._anchors: JsonObject | None = None
        self._count = 0
        self._scales: set[float] = set()
        self._divided = ""

    def read(self) -> Schema:
        """See ``normalise_schema``."""
        made = self._read_schema(self.root, self.where, 0)
        if self._defs and isinstance(made, dict):
            made["$defs"] = self._defs
        if len(self._scales) > 1 and any(not _is_small_scale(one) for one in self._scales):
            raise self._make_error(self._divided, "beside others it must be below 65.536 and in thousandths")
        return made

    def _make_error(self, path: str, what: str) -> BadRequest:
        shown = path if len(path) <= 120 else f"{path[:50]}...{path[-60:]}"
        return BadRequest(f"{shown}: {what}.", param=shown)

    def _read_schema(self, node: Json, path: str, level: int) -> Schema:
        self._count += 1
        if self._count > MOST_SCHEMAS:
            raise self._make_error(self.where, f"the schema holds more than {MOST_SCHEMAS} schemas")
        if level > LEVELS:
            raise self._make_error(path, f"the schema nests deeper than {LEVELS} levels, references followed")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise self._make_error(path, "a schema must be an object or a boolean")
        node = rewrite_schema(node)
        plain: JsonObject = {}
        applied: JsonObject = {}
        early: JsonObject = {}
        for keyword, value in node.items():
            if keyword in IN_PLACE:
                made = self._read_in_place(keyword, value, node, f"{path}.{keyword}", level)
                (applied if plain else early).update(made)
            else:
                self._read_keyword(keyword, value, node, plain, f"{path}.{keyword}", level)
        self._complete(plain, path)
        # Plain keywords in one run: the library reads each run by itself, and some keywords depend on their neighbours.
        return {**early, **plain, **applied}

    def _read_keyword(self, keyword: str, value: Json, node: JsonObject, out: JsonObject, at: str, level: int) -> None:
        if keyword in REFUSED:
            if not has_no_effect(keyword, value, node):
                raise self._make_error(at, f"the keyword {keyword!r} is not supported")
        elif keyword == "type":
            out["type"] = self._check_types(value, at)
        elif keyword in LENGTHS:
            out[keyword] = self._check_length(value, at)
        elif keyword in BOUNDS or keyword == "multipleOf":
            out[keyword] = self._check_number(keyword, value, at)
        elif keyword in ("pattern", "format"):
            self._read_text_keyword(keyword, value, node, out, at)
        elif keyword in ("properties", "patternProperties"):
            out[keyword] = self._read_members(keyword, value, at, level)
        elif keyword in ("additionalProperties", "items"):
            out[keyword] = self._read_schema(value, at, level + 1)
        elif keyword == "prefixItems":
            out[keyword] = self._read_list(value, at, level)
        elif keyword == "required":
            if not isinstance(value, list) or any(not isinstance(one, str) for one in value):
                raise self._make_error(at, "must be a list of names")
            out[keyword] = list(dict.fromkeys(value))

    def _complete(self, out: JsonObject, path: str) -> None:
        """Applies and checks rules that depend on all plain keywords of a schema."""
        if self.closed and "properties" in out and "additionalProperties" not in out:
            out["additionalProperties"] = False
        extra = out.get("minProperties", 0) - len(out.get("required", ()))
        if extra > 1 and (out.get("additionalProperties") is not False or out.get("patternProperties")):
            # Names that the schema does not list may occur twice in a text, but count once.
            raise self._make_error(f"{path}.minProperties", "is supported up to one more than 'required' names")

    # --- keywords about one value ---

    def _check_types(self, value: Json, at: str) -> Json:
        for one in value if isinstance(value, list) and value else [value]:
            if one not in TYPES:
                raise self._make_error(at, f"must be one of {', '.join(TYPES)}, or a list of them")
        return value

    def _check_length(self, value: Json, at: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise self._make_error(at, "must be a whole number, at least 0")
        return min(int(value), SAFE)

    def _check_number(self, keyword: str, value: Json, at: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._make_error(at, "must be a number")
        if keyword != "multipleOf":
            return self._clamp_bound(keyword, value, at)
        if value <= 0:
            raise self._make_error(at, "must be above 0")
        self._scales.add(float(value))
        self._divided = at
        return value

    def _clamp_bound(self, keyword: str, value: float, at: str) -> float:
        """Clamps an integer bound to the range in which integers are exact."""
        if not isinstance(value, int) or abs(value) <= SAFE:
            return value
        if (value > 0) == keyword.endswith("inimum"):
            raise self._make_error(at, f"integers beyond {SAFE} are not supported")
        return SAFE if value > 0 else -SAFE

    def _read_text_keyword(self, keyword: str, value: Json, node: JsonObject, out: JsonObject, at: str) -> None:
        if not isinstance(value, str):
            raise self._make_error(at, "must be a text")
        if keyword == "pattern":
            out["pattern"] = translate_regex(value, at)
            return
        types = node.get("type", "string")
        if value in FREE_FORMATS or not (types == "string" or (isinstance(types, list) and "string" in types)):
            return
        if value in FORMATS:
            out["format"] = FORMATS[value]
        elif value in PATTERNS and "pattern" not in node:
            out["pattern"] = translate_regex(PATTERNS[value], at)
        else:
            raise self._make_error(at, f"the format {value[:40]!r} is not supported")

    # --- keywords that hold schemas ---

    def _read_members(self, keyword: str, value: Json, at: str, level: int) -> JsonObject:
        if not isinstance(value, Mapping):
            raise self._make_error(at, "must be an object")
        out = {}
        for name, one in value.items():
            here = f"{at}.{name}"
            out[translate_regex(name, here) if keyword == "patternProperties" else name] = self._read_schema(
                one, here, level + 1
            )
        return out

    def _read_list(self, value: Json, at: str, level: int) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise self._make_error(at, "must be a list with something in it")
        return [self._read_schema(one, f"{at}[{i}]", level + 1) for i, one in enumerate(value)]

    def _read_in_place(self, keyword: str, value: Json, node: JsonObject, at: str, level: int) -> JsonObject:
        if keyword == "$ref":
            return {"$ref": self._rename_ref(value, at, level)}
        if keyword == "const":
            self._check_constant(value, at)
            return {"const": value}
        if not isinstance(value, list) or not value:
            raise self._make_error(at, "must be a list with something in it")
        if keyword == "enum":
            for i, one in enumerate(value):
                self._check_constant(one, f"{at}[{i}]")
            return {"enum": value}
        tag = node.get("discriminator")
        name = tag.get("propertyName") if isinstance(tag, Mapping) and keyword != "allOf" else None
        name = name if isinstance(name, str) else ""
        if keyword == "oneOf" and not are_all_disjoint(value, lambda ref: self._find_target(ref, at), name):
            raise self._make_error(at, "'oneOf' is supported where no value fits two of its schemas; use 'anyOf'")
        options = self._read_list(value, at, level)
        if name:
            options = [self._require_tag(one, name) for one in options]
        return {"anyOf" if keyword == "oneOf" else keyword: options}

    def _require_tag(self, option: Schema, name: str) -> Schema:
        """Makes an option of a union require the property that distinguishes the options."""
        if not isinstance(option, dict) or name in option.get("required", ()):
            return option
        if "$ref" in option and name in self._get_required(option["$ref"]):
            return option
        return {**option, "required": [*option.get("required", ()), name]}

    def _get_required(self, ref: str) -> Json:
        node = self._defs.get(ref.removeprefix("#/$defs/"), {})
        return node.get("required", ()) if isinstance(node, dict) else ()

    def _check_constant(self, value: Json, at: str) -> None:
        todo = [value]
        while todo:
            one = todo.pop()
            if isinstance(one, list):
                todo.extend(one)
            elif isinstance(one, dict):
                todo.extend(one.values())
            elif isinstance(one, float) and not math.isfinite(one):
                raise self._make_error(at, "must be JSON")
            elif isinstance(one, int) and abs(one) > SAFE:
                raise self._make_error(at, f"integers beyond {SAFE} are not supported")

    # --- references ---

    def _rename_ref(self, ref: Json, at: str, level: int) -> str:
        """Returns the new name of a reference, whose target is read at its first use."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise self._make_error(at, "only references within the schema ('#/...') are supported")
        seen = {ref}
        target = self._find_target(ref, at)
        while isinstance(target, dict) and "$ref" in target and set(target) <= ANNOTATIONS | {"$ref"}:
            ref = target["$ref"]
            if ref in seen:
                raise self._make_error(at, "the reference leads to itself")
            seen.add(ref)
            target = self._find_target(ref, at)
        if target is self.root:
            return "#"
        if ref not in self._names:
            name = f"d{len(self._names)}"
            self._names[ref] = f"#/$defs/{name}"
            self._defs[name] = True
            self._defs[name] = self._read_schema(target, f"{self.where}{ref}", level + 1)
        return self._names[ref]

    def _find_target(self, ref: Json, at: str) -> Json:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise self._make_error(at, "only references within the schema ('#/...') are supported")
        if ref == "#":
            return self.root
        if not ref.startswith("#/"):
            found = self._find_anchors().get(ref[1:])
            if found is None:
                raise self._make_error(at, f"{ref[:60]!r} names nothing in the schema")
            return found
        node = self.root
        for part in unquote(ref[2:]).split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise self._make_error(at, f"{ref[:60]!r} names nothing in the schema")
        return node

    def _find_anchors(self) -> JsonObject:
        """Returns schemas by their ``$anchor``."""
        if self._anchors is None:
            self._anchors = {}
            todo = [self.root]
            while todo:
                node = todo.pop()
                if isinstance(node, dict):
                    for name in (node.get("$anchor"), str(node.get("$id", node.get("id", ""))).removeprefix("#")):
                        if isinstance(name, str) and name:
                            self._anchors.setdefault(name, node)
                    todo.extend(node.values())
                elif isinstance(node, list):
                    todo.extend(node)
        return self._anchors


def _is_small_scale(scale: float) -> bool:
    return scale * 1000 < 65_536 and abs(scale * 1000 - round(scale * 1000)) < 1e-9


def parse_if_text(value: Json, where: str) -> Json:
    """Parses a value that may be a JSON text.

    Raises:
        BadRequest: the text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRequest(f"{where[:60]} is no JSON.", param=where[:120]) from None


def parse_schema(value: Json, where: str) -> Json:
    """Parses a schema that may be a JSON text.

    Raises:
        BadRequest: it is not a schema.
    """
    value = parse_if_text(value, where)
    if not isinstance(value, dict | bool):
        raise BadRequest(f"{where[:60]} must be a JSON schema, an object.", param=where[:120])
    return value
