"""A tokenizer for parts of a text, written exactly as they are: for text that a grammar forces.

A tokenizer is made for whole texts: it may put a blank before them, compose their characters or lower their case. Ids
of what a grammar forces in the middle of an answer must spell those bytes and no others.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

KEPT_NORMALIZERS = ("Replace", "ByteLevel")
"""Normalizers that only write a text in the vocabulary's alphabet."""


def make_verbatim(made: RawTokenizer) -> RawTokenizer:
    """Changes a tokenizer so that ids spell the text as it is, and returns it."""
    normalizer = _keep_alphabet(_state_of(made.normalizer))
    splitter = _without_blank(_state_of(made.pre_tokenizer))
    parts: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    read = RawTokenizer.from_str(json.dumps(parts))
    for name in ("normalizer", "pre_tokenizer"):
        if (part := getattr(read, name)) is not None or getattr(made, name) is not None:
            setattr(made, name, part)
    return made


def _state_of(part: Any) -> dict[str, Any] | None:
    """The entry of a part in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _keep_alphabet(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer without the steps that change what a text says."""
    if entry is None:
        return None
    if entry["type"] == "Sequence":
        steps = [step for step in map(_keep_alphabet, entry["normalizers"]) if step is not None]
        return {**entry, "normalizers": steps} if steps else None
    return entry if entry["type"] in KEPT_NORMALIZERS else None


def _without_blank(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """A pre-tokenizer that puts no blank before a text."""
    if entry is None:
        return None
    if entry["type"] == "Sequence":
        return {**entry, "pretokenizers": [_without_blank(step) for step in entry["pretokenizers"]]}
    changes = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {**entry, **{name: value for name, value in changes.items() if name in entry}}
