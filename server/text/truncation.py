"""Cuts texts to a number of tokens; the tokens that a checkpoint puts around a text or a pair stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trencadis.core.errors import BadRequest
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

READ = 1 << 17
"""Characters that are read of a text that is cut at its end; the rest is not read."""

SPARE = 16
"""Tokens that must follow the cut, so that the end of the read part changes none before it."""


class TypedTokens(NamedTuple):
    """Ids with the token type of each."""

    tokens: list[int]
    types: list[int]


def cut_text(tokenizer: Tokenizer, text: str, most: int, side: str) -> list[int]:
    """Returns the ids of ``text`` with the tokens that the checkpoint puts around it, at most ``most`` in all.

    Args:
        side: the end of the text that is cut, ``right`` or ``left``.

    Raises:
        BadRequest: the text is too long to be cut.
    """
    long = len(text) > READ
    read = (text[:READ] if side == "right" else text[-READ:]) if long else text
    return _cut(tokenizer, (read,), most, side, long).tokens


def encode_pair(tokenizer: Tokenizer, query: str, document: str, most: int | None, side: str) -> TypedTokens:
    """Returns the ids of two texts joined in the checkpoint's form, at most ``most`` in all; the longer text is cut
    first.

    Raises:
        BadRequest: a text is too long to be cut.
    """
    if most is None:
        return _cut(tokenizer, (query, document), None, side, False)
    long = max(len(query), len(document)) > READ
    return _cut(tokenizer, (query[:READ], document[:READ]), most, side, long)


def _cut(tokenizer: Tokenizer, texts: Sequence[str], most: int | None, side: str, long: bool) -> TypedTokens:
    raw = tokenizer.raw
    parts = raw.encode_batch(list(texts), add_special_tokens=False)
    if most is not None:
        budget = max(most - raw.num_special_tokens_to_add(len(parts) > 1), 0)
        for part, text, keep in zip(parts, texts, divide_tokens([len(p.ids) for p in parts], budget), strict=True):
            if long and len(text) >= READ and len(part.ids) < keep + SPARE:
                raise BadRequest("A text of so many characters cannot be cut to so few tokens.", param="input")
            part.truncate(keep, direction=side)
    made = raw.post_process(*parts, add_special_tokens=True)
    return TypedTokens(list(made.ids)[:most], list(made.type_ids)[:most])


def divide_tokens(lengths: Sequence[int], budget: int) -> list[int]:
    """Returns the tokens that each text keeps: the longer one is cut until both are equal (``longest_first``)."""
    if sum(lengths) <= budget:
        return list(lengths)
    if len(lengths) == 1:
        return [budget]
    short, half = min(lengths), budget // 2
    least = short if short <= half else half
    rest = budget - least
    return [least, rest] if lengths[0] <= lengths[1] else [rest, least]
