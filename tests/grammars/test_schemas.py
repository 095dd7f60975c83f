"""Grammars of JSON schemas: what they write fits, what fits they take, and each keyword holds or is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from tests.random_inputs.grammar_draws import GrammarDraws, in_order, written_json
from tests.random_inputs.random_schemas import REAL, random_schema
from tests.random_inputs.schema_instances import damaged, exact, fits, instances, validator
from trencadis.core.errors import BadRequest
from trencadis.server.grammars.json_schema_normaliser import LEVELS
from trencadis.server.grammars.lark_grammar_and_tool_functions import WhitespaceRule
from trencadis.server.grammars.response_format import RequestedFormat
from trencadis.server.grammars.schema_rewrite_and_one_of_disjointness import REFUSED

FORMATTED = jsonschema.Draft202012Validator.FORMAT_CHECKER


def request_format(schema: Any, **more: Any) -> RequestedFormat:
    return RequestedFormat("json", schema, "schema", **more)


def unwritable(value: Any) -> bool:
    """Whether a text holds a control character that JSON writes by its number alone."""
    if isinstance(value, str):
        return any((ord(c) < 32 and c not in "\b\f\n\r\t") or ord(c) == 127 for c in value)
    if isinstance(value, dict):
        return any(unwritable(k) or unwritable(v) for k, v in value.items())
    return isinstance(value, list) and any(map(unwritable, value))


def schemas(count: int) -> list[dict[str, Any]]:
    return [*REAL, *(random_schema(random.Random(i)) for i in range(count - len(REAL)))]


def check_draws(draws: GrammarDraws, wanted: list[dict[str, Any]], each: int) -> tuple[int, int]:
    """Draws texts of each schema; returns how many ended, and how many schemas were refused."""
    ended = refused = 0
    for i, schema in enumerate(wanted):
        try:
            matcher = draws.matcher(draws.written(request_format(schema)))
        except BadRequest as error:
            assert "nsatisfiable" in error.message or "not supported" in error.message, (schema, error.message)
            refused += 1
            continue
        checks = validator(schema)
        for turn in range(each):
            text = draws.draw(matcher, 1000 * i + turn, 200)
            if text is not None:
                ended += 1
                assert fits(checks, text), (schema, text)
    return ended, refused


def check_instances(draws: GrammarDraws, wanted: list[dict[str, Any]], each: int) -> dict[str, int]:
    """Tries values that fit and values beside them; counts those that fit, were taken, and were wrong."""
    counts = {"valid": 0, "accepted": 0, "invalid": 0, "control characters": 0}
    for i, schema in enumerate(wanted):
        try:
            matcher = draws.matcher(draws.written(request_format(schema)))
            found = instances(schema, each, i)
        except Exception:
            continue  # refused, or beyond hypothesis-jsonschema
        checks = validator(schema)
        formats = jsonschema.Draft202012Validator(schema, format_checker=FORMATTED)
        for turn, value in enumerate(found):
            if checks.is_valid(exact(value)) and formats.is_valid(value):
                odd = unwritable(value)
                counts["control characters"] += odd
                counts["valid"] += not odd
                counts["accepted"] += not odd and draws.accepts(matcher, written_json(in_order(value, schema)))
            for other in damaged(value, turn):
                text = written_json(in_order(other, schema))
                if not fits(checks, text):
                    counts["invalid"] += 1
                    assert not draws.accepts(matcher, text), (schema, text)
    return counts


def test_what_grammars_write_fits(demo: GrammarDraws) -> None:
    ended, refused = check_draws(demo, schemas(40), 2)
    assert ended >= 50 and refused <= 4


def test_what_fits_is_taken_and_what_does_not_is_not(demo: GrammarDraws) -> None:
    counts = check_instances(demo, schemas(400)[::28], 5)
    assert counts["accepted"] >= 0.9 * counts["valid"] >= 20 and counts["invalid"] >= 120


@pytest.mark.long
def test_two_thousand_draws_of_five_hundred_schemas_fit(demo: GrammarDraws) -> None:
    ended, refused = check_draws(demo, schemas(500), 6)
    print(f"\n500 schemas: {ended} of {6 * (500 - refused)} texts ended and fit; {refused} schemas refused")
    assert ended >= 2000 and refused <= 50


@pytest.mark.long
def test_twenty_thousand_instances(demo: GrammarDraws) -> None:
    counts = check_instances(demo, schemas(500), 30)
    print(f"\n{counts}: {counts['accepted'] / counts['valid']:.2%} of the valid ones accepted, no invalid one")
    assert counts["valid"] + counts["invalid"] >= 20_000
    assert counts["accepted"] >= 0.95 * counts["valid"]


KEYWORDS: dict[str, Any] = {
    "not": {"type": "string"}, "if": {"minimum": 1}, "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]}, "contains": {"type": "string"}, "unevaluatedItems": {"type": "string"},
    "unevaluatedProperties": {"type": "string"}, "propertyNames": {"maxLength": 3}, "$dynamicRef": "#a",
    "$recursiveRef": "#", "uniqueItems": True, "extends": {}, "disallow": "string", "divisibleBy": 2,
}  # fmt: skip


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_keyword_without_a_grammar_is_named_with_its_path(keyword: str, demo: GrammarDraws) -> None:
    inner = {"type": "object", keyword: KEYWORDS[keyword], "then": {}, "anyOf": [{}]}
    with pytest.raises(BadRequest, match="is not supported") as caught:
        demo.written(request_format({"type": "array", "items": {"type": "object", "properties": {"p": inner}}}))
    assert caught.value.param == f"schema.items.properties.p.{keyword}"


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "strin"}, "type"),
        ({"type": []}, "type"),
        ({"properties": {"a": 1}}, "properties.a"),
        ({"properties": []}, "properties"),
        ({"required": "a"}, "required"),
        ({"enum": []}, "enum"),
        ({"anyOf": [{"minimum": "3"}]}, "anyOf[0].minimum"),
        ({"minimum": True}, "minimum"),
        ({"maxLength": -1}, "maxLength"),
        ({"minItems": 1.5}, "minItems"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"pattern": "(?=a)"}, "pattern"),
        ({"pattern": 3}, "pattern"),
        ({"format": "iban"}, "format"),
        ({"const": 2**60}, "const"),
        ({"enum": [1, [2**60]]}, "enum[1]"),
        ({"minimum": 2**60}, "minimum"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
        ({"$ref": "file:///etc/passwd"}, "$ref"),
        ({"$ref": "other.json#/a"}, "$ref"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"$ref": "#none"}, "$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$ref"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf"),
        ({"minProperties": 2}, "minProperties"),
        ({"items": [3]}, "prefixItems[0]"),
    ],
)
def test_a_wrong_keyword_is_named_with_its_path(schema: Any, path: str, demo: GrammarDraws) -> None:
    with pytest.raises(BadRequest) as caught:
        demo.written(request_format(schema))
    assert caught.value.param == f"schema.{path}"


def test_a_schema_may_be_a_text(demo: GrammarDraws) -> None:
    assert demo.accepts(demo.written(request_format('{"type": "integer"}')), "12")
    for bad in ("{", "3", 3, [1]):
        with pytest.raises(BadRequest):
            demo.written(request_format(bad))


Takes = Callable[[Any, str], bool]


@pytest.fixture
def takes(demo: GrammarDraws) -> Takes:
    return lambda schema, text: demo.accepts(demo.written(request_format(schema)), text)


def test_a_name_has_one_spelling(takes: Takes) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert takes(schema, '{"a":1}') and takes(schema, '{"b":"x"}')
    assert not takes(schema, '{"\\u0061":"x"}')
    assert not takes({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"\\u0061":"x"}')


def test_a_schema_sets_no_options(takes: Takes) -> None:
    lenient = {"x-guidance": {"lenient": True, "whitespace_flexible": True}, "type": "integer", "uniqueItems": True}
    with pytest.raises(BadRequest, match="uniqueItems"):
        takes(lenient, "1")
    assert not takes({"x-guidance": {"whitespace_pattern": "x*"}, "type": "array"}, "[xx1]")


def test_blanks_are_bounded(demo: GrammarDraws) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    some, none, own = (
        demo.written(request_format(schema, spaces=spaces))
        for spaces in (WhitespaceRule(), WhitespaceRule(""), WhitespaceRule("[ ]?"))
    )
    assert [demo.accepts(some, f'{{{" " * n}"a":1}}') for n in (0, 1, 2)] == [True, True, False]
    assert [demo.accepts(some, text) for text in ('{"a": 1 }', '{"a":\t1}', '{"a":  1}')] == [True, False, False]
    assert [demo.accepts(none, text) for text in ('{"a":1}', '{"a": 1}')] == [True, False]
    assert [demo.accepts(own, text) for text in ('{"a": 1}', '{"a":  1}')] == [True, False]
    broken = [demo.accepts(some, f'{{{blanks}"a":1}}') for blanks in ("\n\t", "\r\n  ", "\n\n", " \n")]
    assert broken == [True, True, False, False]
    assert not demo.accepts(some, ' {"a":1}') and not demo.accepts(some, '{"a":1}\n')


def test_a_nested_text_may_be_indented(demo: GrammarDraws) -> None:
    for indent in (4, 2, "\t"):
        text = json.dumps([[[[[[[{"a": 1}]]]]]]], indent=indent)
        assert demo.accepts(demo.written(request_format({"type": "array"})), text)
    assert not demo.accepts(demo.written(request_format({"type": "array"})), "[\n" + " " * 33 + "1]")


def test_no_text_holds_a_control_token(demo: GrammarDraws) -> None:
    made = demo.written(request_format({"type": "string"}))
    assert not demo.accepts(made, '"<|im_end|>"') and not demo.accepts(made, '"a<tool_call>"')
    assert demo.matcher(made).consume_tokens([demo.bytes[b] for b in b'"<|im_end|>"'])


def test_drafts_before_2020_mean_what_they_meant(takes: Takes) -> None:
    pair = {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}
    assert takes(pair, "[1]") and not takes(pair, "[1,2]") and not takes(pair, '["a"]')
    apart = {"items": [{"type": "integer"}], "allOf": [{"type": "array"}], "additionalItems": False}
    assert takes(apart, "[1]") and not takes(apart, "[1,2]")
    above = {"type": "integer", "minimum": 3, "exclusiveMinimum": True}
    assert takes(above, "4") and not takes(above, "3")


def test_references_lead_anywhere_within_the_schema(takes: Takes) -> None:
    schema = {
        "components": {"a/b": {"type": "integer"}, "c%": {"$anchor": "here", "enum": ["x"]}},
        "type": "array",
        "prefixItems": [{"$ref": "#/components/a~1b"}, {"$ref": "#/components/c%25"}, {"$ref": "#here"}],
        "items": {"$ref": "#"},
    }
    assert takes(schema, '[1,"x","x",[2]]') and not takes(schema, '[1,"x","y"]') and not takes(schema, '["x"]')


def test_a_tag_tells_the_branches_of_a_union(takes: Takes) -> None:
    animal = {"$defs": REAL[3]["$defs"], **REAL[3]["properties"]["animal"]}
    assert takes(animal, '{"pet":"cat","lives":9}') and takes(animal, '{"pet":"dog","barks":1}')
    assert not takes(animal, '{"pet":"cow"}') and not takes(animal, '{"lives":9}')


def test_integers_are_exact(takes: Takes) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert takes(schema, str(2**53 - 1)) and not takes(schema, str(2**63)) and not takes(schema, str(2**53))


def test_names_of_properties_may_have_a_form(takes: Takes) -> None:
    for names in ({"enum": ["a", "b|c"]}, {"pattern": "^(a|b\\|c)$"}):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
        assert takes(schema, '{"a":1,"b|c":2}') and not takes(schema, '{"c":1}') and not takes(schema, '{"a":"x"}')


def test_objects_may_be_closed(demo: GrammarDraws) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "o": {"type": "object"}}}
    made = demo.written(request_format(schema, closed=True))
    assert demo.accepts(made, '{"a":1,"o":{"x":2}}') and not demo.accepts(made, '{"a":1,"b":2}')


def test_nesting_is_bounded_with_references_followed(demo: GrammarDraws) -> None:
    def chain(length: int) -> dict[str, Any]:
        defs: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
        return {"$defs": {**defs, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}

    demo.matcher(demo.written(request_format(chain(LEVELS // 2 - 2))))
    with pytest.raises(BadRequest, match="levels") as caught:
        demo.written(request_format(chain(LEVELS)))
    assert caught.value.param is not None and len(caught.value.param) <= 120


def test_the_published_formats_are_taken(takes: Takes) -> None:
    texts = {
        "date": "2024-02-29", "time": "10:00:00Z", "date-time": "2024-02-29T10:00:00+02:00", "ipv4": "10.0.0.1",
        "ipv6": "::1", "uuid": "123e4567-e89b-12d3-a456-426614174000", "email": "a@b.co", "hostname": "a.b",
        "uri": "https://a.b/c?d#e", "uri-reference": "https://a.b", "duration": "P1DT2H", "json-pointer": "/a/~01",
        "int32": "anything", "password": "anything",
    }  # fmt: skip
    for name, text in texts.items():
        assert takes({"type": "string", "format": name}, json.dumps(text)), name
        if text != "anything":
            assert not takes({"type": "string", "format": name}, '"!!"'), name
