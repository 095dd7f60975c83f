"""Encodes texts of any length: first bounded, then in one pass, without the interpreter's lock.

The library releases the lock only for batches, so a text is a batch of one. It takes the lock again to free its
results, about 0.1 us a token, so a text of far too many tokens must be recognized piece by piece.

Cuts texts to a number of tokens; the tokens that a checkpoint puts around a text or a pair stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trencadis.core.errors import BadRequest
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

LONGEST_TOKEN = 512
"""Most characters of any token; a prompt longer than this allows is refused without being tokenized."""
MOST = 8 << 20
"""Most characters of a text, unless 16 characters per token of the model's context are more."""
COUNTED = 1 << 17
"""Length in characters from which tokens are counted before encoding."""
PIECE = 1 << 15


def get_max_characters(max_model_len: int) -> int:
    """Returns the most characters of a text; a longer one is refused without being tokenized."""
    return min(max_model_len * LONGEST_TOKEN, max(MOST, 16 * max_model_len))


def encode_text(raw: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Returns the ids of ``text`` from the library's tokenizer ``raw``."""
    return list(raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def find_kept_end(raw: Any, text: str, most: int, check: Callable[[], None]) -> tuple[str, int]:
    """Returns the shortest end of ``text`` that may have more than ``most`` tokens, or all of it, and its approximate
    number of tokens.

    Counts tokens piece by piece from the end. Cuts may add or save a few tokens, so ``most`` should be generous.
    """
    count, start = 0, len(text)
    while start > 0 and count <= most:
        check()
        end, start = start, max(0, start - PIECE)
        count += len(raw.encode_batch_fast([text[start:end]], add_special_tokens=False)[0])
    return text[start:], count


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
