"""Suggests the known name that a mistyped one stands for; names that merely look alike do not count."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LONGEST = 200
"""Most characters of a name that is compared: the time grows with their square."""

LIKE = 0.75
"""Minimum similarity of a word and its misspelling, from 0 to 1."""


def suggest_name(written: str, names: Iterable[str]) -> str:
    """Returns the name whose words are those of ``written``, possibly misspelt or cut short; "" if there is none.

    Names are compared word by word: as a whole, --max-lora-rank shares more letters with --max-log-len than many a typo
    with the intended name. If two or more words are written, one may be missing.
    """
    if len(written) > LONGEST:
        return ""
    words = _words(written)
    found = [(score, name) for name in names if (score := _alike(words, _words(name)))]
    return max(found)[1] if found else ""


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_]+", name.lower()) if word]


def _alike(written: list[str], known: list[str]) -> float:
    """Returns the similarity of two names from 0 (different) to 1."""
    if len(written) == len(known):
        each = [_word(a, b) for a, b in zip(written, known, strict=True)]
        alike = bool(each) and all(each) and (len(each) == 1 or 1 in each)
        return sum(each) / len(each) if alike else 0
    if 2 <= len(written) == len(known) - 1:
        return max(_cut(written, known[:i] + known[i + 1 :]) for i in range(len(known)))
    return 0


def _cut(written: list[str], rest: list[str]) -> float:
    """Returns the similarity if one of the known words is missing; each other word must be equal or cut short."""
    pairs = list(zip(written, rest, strict=True))
    return sum(_word(a, b) for a, b in pairs) / (len(rest) + 1) if all(_short(a, b) for a, b in pairs) else 0


def _short(written: str, known: str) -> bool:
    """Returns True if the words are equal, or one is the beginning of the other."""
    less, more = sorted((written, known), key=len)
    return written == known or (len(less) > 2 and more.startswith(less))


def _word(written: str, known: str) -> float:
    if written == known:
        return 1
    ratio = difflib.SequenceMatcher(None, written, known).ratio()
    return max(ratio, LIKE) if _short(written, known) else ratio if ratio >= LIKE else 0
