"""Ids of words that a chat model answers with (yes, no), read from tokenizer.json. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import StartupError


class LabelTokens(NamedTuple):
    """Words that an answer may begin with, and their ids."""

    words: tuple[str, ...]
    ids: tuple[int, ...]


def label_tokens(folder: Path, choices: Sequence[Sequence[str]]) -> LabelTokens:
    """The first of ``choices`` whose words are tokens of the vocabulary as they stand, without a blank before them.

    Raises:
        StartupError: there is no vocabulary, or each choice has a word that is not one token of it.
    """
    model = (read_json(folder / "tokenizer.json") or {}).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        raise StartupError(f"--convert classify reads label tokens from {folder / 'tokenizer.json'}, which has none")
    for words in choices:
        found = (vocab.get(w.replace(" ", "\u0120"), vocab.get(w.replace(" ", "\u2581"))) for w in words)
        ids = tuple(one for one in found if isinstance(one, int))
        if len(ids) == len(words):
            return LabelTokens(tuple(words), ids)
    shown = ", ".join(choices[0])[:80]
    raise StartupError(
        f"{shown} are no tokens of {folder.name}; name the answers' tokens with "
        """--hf-overrides '{"classifier_from_token": ["no", "yes"]}'"""
    )
