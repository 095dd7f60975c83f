"""The grammar of an answer's content, from the requested format."""

from __future__ import annotations

from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.server.grammars import gbnf, lark_grammar
from trencadis.server.grammars.grammar_writer import GrammarWriter, WhitespaceRule
from trencadis.server.grammars.json_schema import normalise_schema, parse_schema
from trencadis.server.grammars.regex_translation import escaped, translate_regex
from trencadis.server.grammars.response_format import RequestedFormat
from trencadis.server.grammars.structural_tags import TagReader

MOST_CHOICES = 10_000
ANY_OBJECT = {"type": "object"}


def write_content_rule(asked: RequestedFormat, writer: GrammarWriter) -> str:
    """Writes the rule of the content and returns its name.

    Raises:
        BadRequest: the format is invalid; ``param`` is its JSON path.
    """
    value, where = asked.value, asked.where
    if asked.kind == "json":
        return writer.add_json(normalise_schema(parse_schema(value, where), where, asked.closed), asked.spaces)
    if asked.kind == "json_object":
        return writer.add_json(ANY_OBJECT, asked.spaces)
    if asked.kind == "choice":
        return writer.add_rule(f"/{'|'.join(map(escaped, _check_choices(value, where)))}/")
    if asked.kind == "structural_tag":
        return TagReader(writer, asked.spaces).read(value, where)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{where} must be a text that is not empty.", param=where)
    if asked.kind == "regex":
        return writer.add_rule(f"/{translate_regex(value, where)}/")
    return write_user_grammar(value, where, asked.spaces, writer)


def write_user_grammar(text: str, where: str, spaces: WhitespaceRule, writer: GrammarWriter) -> str:
    """Writes the rule of a user's grammar, in GBNF or Lark, and returns its name."""
    return writer.add_grammar(
        gbnf.convert_to_lark(text, where)
        if gbnf.is_gbnf(text)
        else lark_grammar.check_lark_grammar(text, where, spaces)
    )


def _check_choices(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not value or any(not isinstance(one, str) or not one for one in value):
        raise BadRequest(f"{where} must be a list of texts, none of them empty.", param=where)
    if len(value) > MOST_CHOICES:
        raise BadRequest(f"{where} holds more than {MOST_CHOICES} choices.", param=where)
    return value
