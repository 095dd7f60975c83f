"""Ids of words that a chat model answers with (yes, no), read from tokenizer.json. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trencadis.core.checkpoint.fields import read_json
from trencadis.core.errors import StartupError


def label_tokens(folder: Path, words: Sequence[str]) -> tuple[int, ...]:
    """The id of each word, which must be one token of the vocabulary as it stands, without a blank before it.

    Raises:
        StartupError: there is no vocabulary, or a word is not one token of it.
    """
    model = (read_json(folder / "tokenizer.json") or {}).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        raise StartupError(f"--convert classify reads label tokens from {folder / 'tokenizer.json'}, which has none")
    found = []
    for word in words:
        one = vocab.get(word.replace(" ", "\u0120"), vocab.get(word.replace(" ", "\u2581")))
        if not isinstance(one, int):
            raise StartupError(
                f"{word[:40]!r} is no token of {folder.name}; name the answers' tokens with "
                """--hf-overrides '{"classifier_from_token": ["no", "yes"]}'"""
            )
        found.append(one)
    return tuple(found)
