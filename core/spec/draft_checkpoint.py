"""Reads and checks the checkpoint of a draft model (``--speculative-config`` method ``draft_model``). Torch-free."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.pooler_config import load_model_config
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject
from trencadis.core.spec.eagle_checkpoint import EagleConfig, load_eagle_config
from trencadis.core.spec.spec_config import EAGLE3
from trencadis.core.spec.spec_settings import draft_flag, requested_speculation


def draft_config(config: EngineConfig, target: ModelConfig) -> ModelConfig | None:
    """Returns the configuration of the draft model or head that the flags name; None: they name none.

    Raises:
        StartupError: it cannot draft for ``target``; one line.
    """
    asked, flag = requested_speculation(config), draft_flag
    if asked is None or not asked.model:
        return None
    if asked.method == EAGLE3:
        return load_eagle_config(config, asked.model, target, flag(config)).as_model(target)
    return load_draft_config(config, asked.model, target, flag(config))


def eagle_config(config: EngineConfig, target: ModelConfig) -> EagleConfig | None:
    """Returns the configuration of the head that the flags name; None: they name none.

    Raises:
        StartupError: it is no head for ``target``; one line.
    """
    asked = requested_speculation(config)
    if asked is None or asked.method != EAGLE3:
        return None
    return load_eagle_config(config, asked.model, target, draft_flag(config))


def load_draft_config(config: EngineConfig, path: str, target: ModelConfig, flag: str) -> ModelConfig:
    """Returns the text model of the draft checkpoint at ``path``, a local folder; images are ids to it.

    Args:
        target: the model that verifies.
        flag: how the user wrote the draft, for messages.

    Raises:
        StartupError: it cannot draft for ``target``; one line.
    """
    if not (Path(path) / "config.json").is_file():
        raise StartupError(f"{flag}: {path} is no folder of a checkpoint (it has no config.json)")
    own = dataclasses.replace(config, model=path, hf_overrides={}, runner="auto", convert="auto")
    draft = load_model_config(own)
    _check_texts(draft, target, config.max_model_len or target.text.max_positions, flag)
    _check_tokenizers(draft, target, config, flag)
    return dataclasses.replace(draft, vision=None, pooling=None)


def _check_texts(draft: ModelConfig, target: ModelConfig, length: int, flag: str) -> None:
    """Raises StartupError unless the draft reads and writes the ids of ``target`` in texts of ``length`` tokens."""
    text, wanted = draft.text, target.text
    if text.vocab != wanted.vocab:
        raise StartupError(f"{flag}: {draft.name} has {text.vocab} ids and {target.name} has {wanted.vocab}")
    if text.upto or text.cross_attention_layers or text.recurrent is not None or text.long_from or wanted.long_from:
        named = draft.name if not wanted.long_from else target.name
        raise StartupError(f"{flag}: {named} does not attend causally with one rotary table; ngram needs no model")
    if text.max_positions < length:
        longest = f"--max-model-len {text.max_positions}"
        raise StartupError(f"{flag}: {draft.name} has {text.max_positions} positions; {longest} would do")


def _check_tokenizers(draft: ModelConfig, target: ModelConfig, config: EngineConfig, flag: str) -> None:
    """Raises StartupError if both checkpoints have a tokenizer.json and these give texts other ids."""
    mine, theirs = draft.path / "tokenizer.json", Path(config.tokenizer or target.path) / "tokenizer.json"
    if not (mine.is_file() and theirs.is_file()) or mine.read_bytes() == theirs.read_bytes():
        return
    if _ids_of(mine) != _ids_of(theirs):
        raise StartupError(f"{flag}: the tokenizers of {draft.name} and {target.name} differ")


def _ids_of(path: Path) -> tuple[object, object]:
    """Returns what determines the ids of texts: the vocabulary with its merges, and the added tokens."""
    content: JsonObject = read_json(path) or {}
    added = content.get("added_tokens")
    pairs = [(t.get("content"), t.get("id")) for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    return content.get("model"), pairs
