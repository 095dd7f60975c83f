"""Makes a tokenizer that spells parts of a text exactly: for text that a grammar forces.

A tokenizer is made for whole texts: it may put a blank before them, compose their characters or lower their case. Ids
of text that a grammar forces in the middle of an answer must spell those bytes and no others.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

KEPT_NORMALIZERS = ("Replace", "ByteLevel")
"""Normalizers that only convert a text to the vocabulary's alphabet."""


def make_verbatim(made: RawTokenizer) -> RawTokenizer:
    """Changes a tokenizer so that its ids spell a text exactly, and returns it."""
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
    """Returns the entry of a part in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _keep_alphabet(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a normalizer without the steps that change a text's characters; None if no step is left."""
    if entry is None:
        return None
    if entry["type"] == "Sequence":
        steps = [step for step in map(_keep_alphabet, entry["normalizers"]) if step is not None]
        return {**entry, "normalizers": steps} if steps else None
    return entry if entry["type"] in KEPT_NORMALIZERS else None


def _without_blank(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a pre-tokenizer that puts no blank before a text."""
    if entry is None:
        return None
    if entry["type"] == "Sequence":
        return {**entry, "pretokenizers": [_without_blank(step) for step in entry["pretokenizers"]]}
    changes = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {**entry, **{name: value for name, value in changes.items() if name in entry}}
