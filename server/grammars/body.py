"""The grammar of an answer's content, from the form that was asked for."""

from __future__ import annotations

from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.server.grammars import gbnf, lark
from trencadis.server.grammars.asked import AskedForm
from trencadis.server.grammars.regex import escaped, translated
from trencadis.server.grammars.schema import normalised, parsed_schema
from trencadis.server.grammars.tags import TagReader
from trencadis.server.grammars.writer import GrammarWriter, Spaces

MOST_CHOICES = 10_000
ANY_OBJECT = {"type": "object"}


def body(asked: AskedForm, writer: GrammarWriter) -> str:
    """The rule of the content.

    Raises:
        BadRequest: the form is none; ``param`` says where.
    """
    value, where = asked.value, asked.where
    if asked.kind == "json":
        return writer.json(normalised(parsed_schema(value, where), where, asked.closed), asked.spaces)
    if asked.kind == "json_object":
        return writer.json(ANY_OBJECT, asked.spaces)
    if asked.kind == "choice":
        return writer.rule(f"/{'|'.join(map(escaped, _choices(value, where)))}/")
    if asked.kind == "structural_tag":
        return TagReader(writer, asked.spaces).read(value, where)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{where} must be a text that is not empty.", param=where)
    if asked.kind == "regex":
        return writer.rule(f"/{translated(value, where)}/")
    return grammar(value, where, asked.spaces, writer)


def grammar(text: str, where: str, spaces: Spaces, writer: GrammarWriter) -> str:
    """The rule of a user's grammar, in GBNF or Lark."""
    return writer.grammar(gbnf.lark_of(text, where) if gbnf.is_gbnf(text) else lark.checked(text, where, spaces))


def _choices(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not value or any(not isinstance(one, str) or not one for one in value):
        raise BadRequest(f"{where} must be a list of texts, none of them empty.", param=where)
    if len(value) > MOST_CHOICES:
        raise BadRequest(f"{where} holds more than {MOST_CHOICES} choices.", param=where)
    return value
