"""Encodes texts of any length: first bounded, then in one pass, without the interpreter's lock.

The library releases the lock only for batches, so a text is a batch of one. It takes the lock again to free its
results, about 0.1 us a token, so a text of far too many tokens must be recognized piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LONGEST_TOKEN = 512
"""No token has more characters, so a longer prompt than this allows is refused unread."""
MOST = 8 << 20
"""Most characters of a text, unless the context of the model is so long that 16 a token are more."""
COUNTED = 1 << 17
"""Length in characters from which tokens are counted before encoding."""
PIECE = 1 << 15


def get_max_characters(max_model_len: int) -> int:
    """Most characters of a text; a longer one is refused unread."""
    return min(max_model_len * LONGEST_TOKEN, max(MOST, 16 * max_model_len))


def encode_text(raw: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """The ids of ``text`` from the library's tokenizer ``raw``."""
    return list(raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def find_kept_end(raw: Any, text: str, most: int, check: Callable[[], None]) -> tuple[str, int]:
    """The shortest end of ``text`` that may have more than ``most`` tokens, and about how many it has; else all of it.

    Counts tokens piece by piece from the end. Cuts may add or save a few tokens, so ``most`` should be generous.
    """
    count, start = 0, len(text)
    while start > 0 and count <= most:
        check()
        end, start = start, max(0, start - PIECE)
        count += len(raw.encode_batch_fast([text[start:end]], add_special_tokens=False)[0])
    return text[start:], count
