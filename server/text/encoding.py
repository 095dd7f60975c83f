"""Encoding of texts of any length: bounded before it is done in one pass, and without the interpreter's lock.

The library gives the lock away for batches only, so a batch of one is what is asked for. It takes the lock again to
free what it made, about 0.1 us a token, so a text of far too many tokens must be found out in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LONGEST_TOKEN = 512
"""Characters that no token exceeds; longer prompts are refused without reading them."""
MOST = 8 << 20
"""Characters of a text that is read at all, unless the model takes so many tokens that 16 each are more."""
COUNTED = 1 << 17
"""Characters from which the tokens are counted first."""
PIECE = 1 << 15


def most_characters(max_model_len: int) -> int:
    """Characters above which a text is refused unread."""
    return min(max_model_len * LONGEST_TOKEN, max(MOST, 16 * max_model_len))


def ids_of(raw: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """The ids of ``text`` by a tokenizer of the library."""
    return list(raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def kept(raw: Any, text: str, most: int, check: Callable[[], None]) -> tuple[str, int]:
    """The end of ``text`` that holds more than ``most`` tokens, and about how many; all of it where it has fewer.

    Tokens are counted from the end in pieces. A cut may add or save a few, so ``most`` should be generous.
    """
    if len(text) <= COUNTED:
        return text, 0
    count, start = 0, len(text)
    while start > 0 and count <= most:
        check()
        end, start = start, max(0, start - PIECE)
        count += len(raw.encode_batch_fast([text[start:end]], add_special_tokens=False)[0])
    return text[start:], count
