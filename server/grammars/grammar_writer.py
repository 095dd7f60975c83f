"""Writes one combined grammar: Lark rules of an answer's outline, with schemas and users' grammars as sub-grammars.

Checks a user's Lark grammar: its schemas are read as all others are, and options without effect are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.grammars.json_schema import normalise_schema
from trencadis.server.grammars.regex_translation import escaped

ANY = "(?s:.*)"
"""Any text, as a regex; control tokens are none."""
BLANKS = r" |\r?\n(?: {1,32}|\t{1,16})?"
"""Blanks at one place of a JSON text, as a regex, unless a request says otherwise: one space, or a line break with the
indentation of a nested text. Small models write blanks up to the limit of an answer where they may."""
BETWEEN = r"/[ \t\n\r]{0,16}/"
"""Regex of the blanks between a thought, or a call, and the text after it."""
ESCAPES = 'nrbtf\\"'
"""Characters allowed after a backslash in JSON strings."""


@dataclass(frozen=True, slots=True)
class WhitespaceRule:
    """Rule for blanks in JSON texts.

    Args:
        pattern: regex of the blanks at one place, where none are always allowed; empty: no blanks.
    """

    pattern: str = BLANKS

    def make_options(self, schema: Json) -> JsonObject:
        """Returns the library's options for a normalised schema.

        If an object may have names besides those that the schema lists, the escape ``\\u`` is not allowed: the library
        would not recognise a listed name in that spelling, and would not apply its schema.
        """
        escapes = ESCAPES if _names_some_properties(schema) else ESCAPES + "u"
        if not self.pattern:
            return {"whitespace_flexible": False, "json_allowed_escapes": escapes}
        return {"whitespace_pattern": self.pattern, "json_allowed_escapes": escapes}


def _names_some_properties(schema: Json) -> bool:
    """Returns True if a part of a schema lists names of properties and allows others."""
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            lists = "properties" in node or "required" in node or "patternProperties" in node
            if lists and node.get("additionalProperties") is not False:
                return True
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return False


def quoted(text: str) -> str:
    """Returns a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class GrammarWriter:
    """Collects the rules of one grammar.

    Args:
        control: ids of control tokens by their texts. Such a text in an outline is written as its token.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        names = sorted(control, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._rules: list[str] = []
        self._sides: dict[str, JsonObject] = {}
        self._known: dict[str, str] = {}

    def is_token(self, text: str) -> bool:
        """Returns True if a text is one control token."""
        return text in self._control

    def write_text(self, text: str) -> str:
        """Returns a text in Lark; control tokens in it are written as tokens."""
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(f"<[{self._control[p]}]>" if p in self._control else quoted(p) for p in parts if p) or '""'

    def add_rule(self, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def add_terminal(self, body: str) -> str:
        """Adds a terminal, which the lexer matches as a whole, and returns its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def add_json(self, schema: Json, spaces: WhitespaceRule = WhitespaceRule()) -> str:
        """Adds a JSON text that fits a normalised schema; returns its name."""
        whole = {} if schema is True else {"not": {}} if schema is False else dict(schema)
        return self._add_nested("json_schema", {**whole, "x-guidance": spaces.make_options(schema)})

    def add_grammar(self, lark: str) -> str:
        """Adds a text of a separate Lark grammar; returns its name."""
        return self._add_nested("lark_grammar", lark)

    def _add_nested(self, kind: str, value: Json) -> str:
        key = kind + json.dumps(value)
        if key not in self._known:
            name = f"g{len(self._sides)}"
            self._sides[name] = {"name": name, kind: value}
            self._known[key] = f"@{name}"
        return self._known[key]

    def write_until(self, end: str, some: str = "") -> str:
        """Adds a rule for any text up to and including ``end``, which the text before must not contain.

        Args:
            some: a regex of the text, instead of any text.
        """
        if self.is_token(end):
            return self.add_rule(f"/{some or ANY}/ {self.write_text(end)}")
        if some:
            return self.add_rule(f"/{some}/ {self.write_text(end)}")
        return self.add_rule(f"/{ANY}{escaped(end)}/", "lazy")

    def write_free_text(self, *without: str) -> str:
        """Adds a terminal for any text that contains none of some texts."""
        plain = [one for one in without if one and not self.is_token(one)]
        return self.add_terminal(f"/{ANY}/" + "".join(f" & ~/{ANY}{escaped(one)}{ANY}/" for one in plain))

    def write_grammar(self, start: str) -> str:
        """Returns the grammar in the form that ``LLMatcher`` takes."""
        if not self._rules and re.fullmatch(r"@g\d+", start):
            return json.dumps({"grammars": [self._sides[start[1:]]]})
        lark = "\n".join((f"start: {start}", *self._rules)) + "\n"
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lark}, *self._sides.values()]})


_PIECE = re.compile(
    r"""(?P<skip>\s++|//[^\n]*+|\#[^\n]*+|"(?:[^"\\]|\\.)*+"i?|/(?![/*])(?:[^/\\\n]|\\.)++/[a-z]*+)"""
    r"""|(?P<json>%json\b)|(?P<options>\[[a-z_]+\s*[=,\]])|(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_OPTION = re.compile(r"\b(temperature|max_tokens|stop)\s*=")
_SIGN = re.compile(r"(?m)^\s*[?!]?start\b[^:\n]*:")


def check_lark_grammar(text: str, param: str, spaces: WhitespaceRule) -> str:
    """Returns a user's grammar, ready to be compiled.

    Raises:
        BadRequest: it has no ``start``, an option that is not supported, or a bad schema.
    """
    if not _SIGN.search(text):
        raise BadRequest("The grammar has neither a rule 'start: ...' (Lark) nor 'root ::= ...' (GBNF).", param=param)
    out: list[str] = []
    at = 0
    while at < len(text):
        match = _PIECE.match(text, at)
        assert match is not None  # always matches at least one character
        at = match.end()
        if match["json"]:
            start = re.compile(r"\s*").match(text, at)
            try:
                schema, at = json.JSONDecoder().raw_decode(text, start.end() if start else at)
            except (ValueError, RecursionError):
                raise BadRequest("The grammar has no JSON behind %json.", param=param) from None
            made = normalise_schema(schema, f"{param}.%json")
            whole = made if isinstance(made, dict) else {} if made else {"not": {}}
            out.append("%json " + json.dumps({**whole, "x-guidance": spaces.make_options(made)}))
            continue
        if match["options"]:
            end = text.find("]", match.start())
            option = _OPTION.search(text, match.start(), end if end > 0 else len(text))
            if option:
                raise BadRequest(f"The grammar's option {option[1]!r} is not supported.", param=param)
        out.append(match[0])
    return "".join(out)
