"""JSON schemas at random, with every keyword that grammars enforce, and schemas as real tools have them."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "count", "tags", "kind", "x", "start date", "größe", "a/b", "id", "note")
PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "ab", "^[a-f0-9]+$", "^(yes|no)$", "^\\w+@\\w+$", "[0-9]$")
FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "uri", "duration")
VALUES: tuple[Any, ...] = ("red", "a b", "ü", 0, 7, -3, 1.5, True, None, [1, "x"], {"k": 1})


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """One schema of at most ``depth`` levels."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "types"]
    if depth:
        kinds += ["object", "object", "object", "array", "array", "tuple", "anyOf", "oneOf", "allOf", "map", "patterns"]
    made: dict[str, Any] = _KINDS[rng.choice(kinds)](rng, depth)
    if rng.random() < 0.2:
        made["description"] = "What it is."
    return made


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    turn = rng.randrange(4)
    if turn == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if turn == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randrange(3)
    return (
        {"type": "string"}
        if turn == 2
        else {"type": "string", "minLength": least, "maxLength": least + rng.randrange(9)}
    )


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    return rng.choice([
        {"type": "integer"},
        {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)},
        {"type": "integer", "exclusiveMinimum": low},
        {"type": "integer", "multipleOf": rng.choice([2, 5, 7])},
        {"type": "integer", "minimum": low, "multipleOf": 3},
    ])  # fmt: skip


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50) / 4
    return rng.choice([
        {"type": "number"},
        {"type": "number", "minimum": low, "maximum": low + 10},
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 2.5},
        {"type": "number", "maximum": low},
        {"type": "number", "multipleOf": rng.choice([0.5, 0.01])},
    ])  # fmt: skip


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(1, 4))
    made: dict[str, Any] = {"type": "object", "properties": {n: random_schema(rng, depth - 1) for n in names}}
    made["required"] = [n for n in names if rng.random() < 0.6]
    turn = rng.randrange(4)
    if turn < 2:
        made["additionalProperties"] = False
    elif turn == 2:
        made["additionalProperties"] = random_schema(rng, 0)
    if rng.random() < 0.3:
        made["required"].append("extra")
        made.pop("additionalProperties", None)
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    made = {"type": "array", "items": random_schema(rng, depth - 1)}
    return made if rng.random() < 0.3 else {**made, "minItems": least, "maxItems": least + rng.randrange(4)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    heads = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    rest: Any = rng.choice([False, {"type": "integer"}])
    return {"type": "array", "prefixItems": heads, "items": rest, "minItems": rng.randrange(len(heads) + 1)}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    options = [
        {"type": "object", "properties": {"kind": {"const": kind}, "v": random_schema(rng, depth - 1)},
         "required": ["kind"], "additionalProperties": False}
        for kind in ("a", "b", "c")[: rng.randrange(2, 4)]
    ]  # fmt: skip
    return {"oneOf": [*options, {"type": "integer"}]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [
        {"type": "object", "properties": {name: random_schema(rng, depth - 1)}, "required": [name]}
        for name in rng.sample(WORDS, 2)
    ]
    return {"allOf": parts}


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    made = {"type": "object", "additionalProperties": random_schema(rng, depth - 1)}
    return rng.choice([made, {**made, "minProperties": 1}, {**made, "maxProperties": 2}])


def _patterns(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "object",
        "patternProperties": {"^x_": random_schema(rng, depth - 1), "^[0-9]+$": {"type": "boolean"}},
        "additionalProperties": rng.choice([False, {"type": "null"}]),
    }


_KINDS: dict[str, Any] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": "null"},
    "enum": lambda rng, depth: {"enum": rng.sample(VALUES, rng.randrange(1, 5))},
    "const": lambda rng, depth: {"const": rng.choice(VALUES)},
    "types": lambda rng, depth: {"type": rng.sample(["string", "integer", "null", "boolean"], 2)},
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "anyOf": lambda rng, depth: {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]},
    "oneOf": _one_of,
    "allOf": _all_of,
    "map": _map,
    "patterns": _patterns,
}

REAL: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "City and country, as in Bogotá, Colombia"},
            "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location", "units"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "Step": {
                "properties": {"explanation": {"title": "Explanation", "type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "title": "Step",
                "type": "object",
            }
        },
        "properties": {
            "steps": {"items": {"$ref": "#/$defs/Step"}, "type": "array"},
            "final_answer": {"type": "string"},
        },
        "required": ["steps", "final_answer"],
        "title": "MathReasoning",
        "type": "object",
    },
    {
        "type": "object",
        "properties": {
            "type": {"enum": ["div", "button", "form"]},
            "label": {"type": "string"},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["type", "label", "children"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "Cat": {
                "type": "object",
                "properties": {"pet": {"const": "cat", "default": "cat"}, "lives": {"type": "integer"}},
            },
            "Dog": {
                "type": "object",
                "properties": {"pet": {"const": "dog", "default": "dog"}, "barks": {"type": "number"}},
            },
        },
        "type": "object",
        "properties": {
            "animal": {
                "discriminator": {"propertyName": "pet", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            },
            "seen": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}], "default": None},
        },
        "required": ["animal"],
    },
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "minLength": 1},
            "top_k": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
            "filters": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
            "box": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 4, "maxItems": 4},
        },
        "required": ["query"],
    },
)
"""As users send them: OpenAI's examples and what pydantic writes."""
