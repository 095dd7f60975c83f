"""Regexes of users: Python's ``re`` matches whatever their grammars write."""

from __future__ import annotations

import random
import re
import warnings

import pytest

from tests.random_inputs.grammar_draws import GrammarDraws
from trencadis.core.errors import BadRequest
from trencadis.server.grammars.response_format import RequestedFormat

PATTERNS = (
    r"[a-z]{3}-\d{2}", r"^\d{4}-\d{2}-\d{2}$", r"(yes|no|maybe)", r"\w+@\w+\.(com|org)", r"#[0-9A-Fa-f]{6}",
    r"\+?\(?\d{1,3}\)?[ .-]?\d+", r"(?i)true|false", r"(?:ab|cd)+?x", r"[^\W\d_]+", r"\$\d+\.\d{2}", r"[\s\S]{2,4}",
    r"(?P<year>\d{4})", r"\{\"a\": [0-9]+\}", r"a{,3}b{2,}", r"[]x-]+", r"[^]x]{2}", r"\u00e9\x41", r"/usr(/\w+)*",
    r"\A[ab]+\Z", r"[a&&b]{1,3}", r"[+--]{2}", r"x(?#comment)y", r"\D\S\W", r"[\D]{2}", r".{0,5}", r"(a|(b|(c|d)))*e",
)  # fmt: skip
PIECES = (
    "a", "\\.", "[a-f]", "\\d", "\\w", "[^0-9]", "(x|y)", "(?:ab)", "é", " ", "-", "/", "\\/", "#", "[\\w.]", "\\s",
    "{", "~", "\\u00fc", "(?i:q)", "[^\\W\\d]", "[^\\s\\D]",
)  # fmt: skip
REPEATS = ("", "", "*", "+", "?", "{2}", "{1,3}", "{,2}", "*?", "+?")


def random_regex(number: int) -> str:
    rng = random.Random(number)
    parts = ["".join(rng.choice(PIECES) + rng.choice(REPEATS) for _ in range(rng.randrange(1, 6))) for _ in range(2)]
    return rng.choice(["{0}", "^{0}$", "({0}|{1})", "({0})?{1}"]).format(*parts)


def check(draws: GrammarDraws, patterns: list[str], each: int) -> int:
    ended = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sets that another Python may read otherwise
        for pattern in patterns:
            matcher = draws.matcher(draws.written(RequestedFormat("regex", pattern, "regex")))
            for turn in range(each):
                text = draws.draw(matcher, turn, 100)
                if text is not None:
                    ended += 1
                    assert re.fullmatch(pattern, text), (pattern, text)
    return ended


def test_what_regexes_write_matches(demo: GrammarDraws) -> None:
    assert check(demo, [*PATTERNS, *map(random_regex, range(20))], 2) >= 60


@pytest.mark.long
def test_a_hundred_regexes(demo: GrammarDraws) -> None:
    ended = check(demo, [*PATTERNS, *map(random_regex, range(1000, 1100 - len(PATTERNS)))], 10)
    print(f"\n100 regexes: {ended} of 1000 texts ended, and re.fullmatch takes them all")
    assert ended >= 800


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"\d{,3}", ""), (r"{\"a\": \d+}", '{"a": 12}'), ("a\nb", "a\nb"), (r"\ud83d\ude00", "😀"), (r"[\s\S]+", "a\n")],
)
def test_spellings_of_other_dialects_are_read(pattern: str, text: str, demo: GrammarDraws) -> None:
    assert demo.accepts(demo.written(RequestedFormat("regex", pattern, "regex")), text)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(?=a)", "lookahead"), ("(?!a)", "lookahead"), ("(?<=a)b", "lookbehind"), ("(?<!a)b", "lookbehind"),
        (r"(a)\1", "backreferences"), ("(?P<x>a)(?P=x)", "backreferences"), (r"\bword", "word boundaries"),
        ("a++", "possessive"), ("(?>a)", "atomic"), ("(?(1)a|b)", "conditions"), ("a**", "repeats"), ("*a", "repeats"),
        ("[a", "open class"), ("a\\", "ends with"), (r"\q", "unknown escape"), (r"\xg", "incomplete"),
        (r"\ud800", "does not exist"), ("(?x)a b", "kind of group"), ("", "not empty"),
    ],
)  # fmt: skip
def test_what_no_automaton_can_do_is_refused_by_name(pattern: str, what: str, demo: GrammarDraws) -> None:
    with pytest.raises(BadRequest, match=what) as caught:
        demo.written(RequestedFormat("regex", pattern, "regex"))
    assert caught.value.param == "regex"
