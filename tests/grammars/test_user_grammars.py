"""Grammars of users in GBNF and Lark: what they write is theirs by a recogniser that shares nothing with them."""

from __future__ import annotations

import json

import pytest

from tests.random_inputs.grammar_draws import GrammarDraws
from tests.random_inputs.random_gbnf import RandomGrammar
from trencadis.core.errors import BadRequest
from trencadis.server.grammars.response_format import RequestedFormat

JSON = r"""
# the grammar of JSON, as llama.cpp's users write it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*"""


def request_format(text: str) -> RequestedFormat:
    return RequestedFormat("grammar", text, "grammar")


def check(draws: GrammarDraws, numbers: range, each: int) -> tuple[int, int]:
    """Draws texts of random grammars; returns how many ended, and how many grammars have no text at all."""
    ended = empty = 0
    for number in numbers:
        grammar = RandomGrammar.of(number)
        try:
            matcher = draws.matcher(draws.written(request_format(grammar.text())))
        except BadRequest:
            empty += 1
            continue
        for turn in range(each):
            text = draws.draw(matcher, turn, 120)
            if text is not None:
                ended += 1
                assert grammar.takes(text), (grammar.text(), text)
    return ended, empty


def test_what_gbnf_grammars_write_is_theirs(demo: GrammarDraws) -> None:
    ended, empty = check(demo, range(40), 3)
    assert ended >= 80 and not empty


@pytest.mark.long
def test_a_hundred_grammars(demo: GrammarDraws) -> None:
    ended, empty = check(demo, range(100, 200), 10)
    print(f"\n100 GBNF grammars: {ended} of 1000 texts ended, each one the grammar's; {empty} grammars refused")
    assert ended >= 700 and not empty


def test_the_json_grammar_of_llama_cpp(demo: GrammarDraws) -> None:
    matcher = demo.matcher(demo.written(request_format(JSON)))
    for text in ('{"a":[1,2.5e3,{"b":"x\\n\\u00e9"}],"c":null}', "{}", '{"a": true\n  }'):
        assert demo.accepts(matcher, text)
    assert not demo.accepts(matcher, '{"a":}') and not demo.accepts(matcher, "[1]")
    for i in range(10):
        drawn = demo.draw(matcher, i)
        assert drawn is None or isinstance(json.loads(drawn), dict)


def test_blanks_that_two_rules_could_take_do_not_lock_a_grammar(demo: GrammarDraws) -> None:
    matcher = demo.matcher(demo.written(request_format(ARITHMETIC)))
    assert demo.accepts(matcher, "a+b*(3)=c\n") and demo.accepts(matcher, "a = 1 \n\nb=2\n")
    assert not demo.accepts(matcher, "a+=b\n")


def test_within_one_terminal_every_division_is_found(demo: GrammarDraws) -> None:
    made = demo.written(request_format('root ::= [a-z]+ "abc" [a-z]*'))
    assert demo.accepts(made, "xyabc") and demo.accepts(made, "xabcabc") and not demo.accepts(made, "abc")


def test_lark_grammars_are_taken(demo: GrammarDraws) -> None:
    made = demo.written(request_format('start: "a" rest*\nrest: /[0-9]+/ | "b" # more\n'))
    assert demo.accepts(made, "a12b") and not demo.accepts(made, "b")
    named = demo.written(request_format('start: "x" <|im_end|>'))
    assert demo.accepts(named, "x<|im_end|>") and not demo.accepts(named, "x")


def test_schemas_within_lark_are_read_as_all_others(demo: GrammarDraws) -> None:
    made = demo.written(
        request_format('start: "=" obj\nobj: %json {"type": "object", "x-guidance": {"lenient": true}}')
    )
    assert demo.accepts(made, '={"a": 1}') and not demo.accepts(made, f"={{{' ' * 17}}}")
    with pytest.raises(BadRequest, match="uniqueItems"):
        demo.written(request_format('start: %json {"type": "array", "uniqueItems": true}'))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not empty"),
        ("hello", "neither"),
        ("root ::= none", "no rule"),
        ('a ::= "b"', "'root'"),
        ("root ::= (", "not closed"),
        ('root ::= "a', "begins nothing"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root ::= "\\uD800"', "no character"),
        ('root ::= "a"' + "*" * 9, "too often"),
        ("root ::= " + "(" * 99 + '"a"' + ")" * 99, "nest"),
        ("start: %json {", "no JSON"),
        ('start: x\nx[temperature=0.5]: "a"', "temperature"),
        ('start: x\nx[capture, stop="b"]: /a*/', "stop"),
    ],
)
def test_a_bad_grammar_says_why(text: str, why: str, demo: GrammarDraws) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        demo.written(request_format(text))
    assert caught.value.param == "grammar" and len(caught.value.message) < 200
