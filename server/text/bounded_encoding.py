"""Encodes texts of any length: first bounded, then in one pass, without the interpreter's lock.

The library releases the lock only for batches, so a text is a batch of one. It takes the lock again to free its
results, about 0.1 us a token, so a text of far too many tokens must be recognized piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer

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


def encode_text(raw: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Returns the ids of ``text`` from the library's tokenizer ``raw``."""
    return list(raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def find_kept_end(raw: Tokenizer, text: str, most: int, check: Callable[[], None]) -> tuple[str, int]:
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
