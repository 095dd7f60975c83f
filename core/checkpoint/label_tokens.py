"""Looks up the ids of a chat model's answer words (yes, no) in tokenizer.json. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import StartupError


class LabelTokens(NamedTuple):
    """Words that an answer may begin with, and their token ids."""

    words: tuple[str, ...]
    ids: tuple[int, ...]


def label_tokens(folder: Path, choices: Sequence[Sequence[str]]) -> LabelTokens:
    """Returns the first of ``choices`` whose words all are single tokens of the vocabulary, without a preceding blank.

    Raises:
        StartupError: there is no vocabulary, or every choice has a word that is not a single token.
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
