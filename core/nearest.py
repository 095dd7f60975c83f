"""Which known name a mistyped one stands for; none where they merely look alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LIKE = 0.75
"""Share of equal letters from which a word is a misspelling of another."""


def nearest(written: str, names: Iterable[str]) -> str:
    """The name of which each word is a word of ``written``, maybe misspelt or cut short; "" without one.

    Letters of the whole name do not count: --max-lora-rank shares more of them with --max-log-len than many a typo
    shares with what was meant. One word may be missing of two or more that are written.
    """
    words = _words(written)
    found = [(score, name) for name in names if (score := _alike(words, _words(name)))]
    return max(found)[1] if found else ""


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_]+", name.lower()) if word]


def _alike(written: list[str], known: list[str]) -> float:
    """0 for different names, else up to 1."""
    if len(written) == len(known):
        each = [_word(a, b) for a, b in zip(written, known, strict=True)]
        alike = bool(each) and all(each) and (len(each) == 1 or 1 in each)
        return sum(each) / len(each) if alike else 0
    if 2 <= len(written) == len(known) - 1:
        return max(_cut(written, known[:i] + known[i + 1 :]) for i in range(len(known)))
    return 0


def _cut(written: list[str], rest: list[str]) -> float:
    """Likeness where one of the known words is missing: the others must stand as they are or cut short."""
    pairs = list(zip(written, rest, strict=True))
    return sum(_word(a, b) for a, b in pairs) / (len(rest) + 1) if all(_short(a, b) for a, b in pairs) else 0


def _short(written: str, known: str) -> bool:
    """Whether one is the other, or its beginning."""
    less, more = sorted((written, known), key=len)
    return written == known or (len(less) > 2 and more.startswith(less))


def _word(written: str, known: str) -> float:
    if written == known:
        return 1
    ratio = difflib.SequenceMatcher(None, written, known).ratio()
    return max(ratio, LIKE) if _short(written, known) else ratio if ratio >= LIKE else 0
