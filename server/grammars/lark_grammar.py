"""Checks a user's Lark grammar: its schemas are read as all others are, and options without effect are refused."""

from __future__ import annotations

import json
import re

from trencadis.core.errors import BadRequest
from trencadis.server.grammars.grammar_writer import WhitespaceRule
from trencadis.server.grammars.json_schema import normalise_schema

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
