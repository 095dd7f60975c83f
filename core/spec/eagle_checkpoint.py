"""Reads the configuration of an EAGLE-3 head (``--speculative-config`` method ``eagle3``). Torch-free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.checkpoint.model_config import POST, ModelConfig, TextConfig
from trencadis.core.checkpoint.registry import PLAIN_DECODER
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping

HEAD = "Eagle3"
"""What the names of architectures of heads contain; the rest of a name is that of the target."""

STATES = 3
"""Layers whose hidden states a head reads."""


@dataclass(frozen=True)
class EagleConfig:
    """A head that drafts from hidden states of the target model.

    Args:
        text: its one layer, whose ``vocab`` is that of drafts.
        taps: layers of the target before which the residual stream is read.
        norm_first: the residual stream of the head begins with the normed hidden state.
    """

    path: Path
    text: TextConfig
    taps: tuple[int, ...]
    norm_first: bool = False

    def as_model(self, target: ModelConfig) -> ModelConfig:
        """Returns a model whose KV cache and weights have the head's sizes."""
        return dataclasses.replace(target, path=self.path, text=self.text, vision=None, pooling=None, quant=None)


def load_eagle_config(config: EngineConfig, path: str, target: ModelConfig, flag: str) -> EagleConfig:
    """Returns the configuration of the head at ``path``, a local folder.

    Args:
        flag: how the user wrote it, for messages.

    Raises:
        StartupError: it is no head for ``target``; one line.
    """
    raw = read_json(Path(path) / "config.json")
    if raw is None:
        raise StartupError(f"{flag}: {path} is no folder of a head (it has no config.json)")
    named = (raw.get("architectures") or ["none"])[0]
    if HEAD not in named:
        raise StartupError(
            f"{flag}: {path} holds {named}; eagle3 takes a head, whose architecture has {HEAD} in its name"
        )
    wanted = target.text
    if wanted.cross_attention_layers or wanted.long_from or wanted.norm_placement == POST or wanted.table:
        raise StartupError(f"{flag}: {target.architecture} has no residual stream that a head reads; ngram needs none")
    scaling = raw.get("rope_scaling")
    section = scaling.get("mrope_section") if isinstance(scaling, dict) else None
    over: dict[str, object] = {"architectures": [PLAIN_DECODER]}
    if section:
        over["rope_scaling"] = None
    text = load_config(Path(path), "", over).text
    if section:
        text = dataclasses.replace(text, mrope_section=tuple(section))
    _check_sizes(raw, text, target, config.max_model_len or target.text.max_positions, f"{flag}: {Path(path).name}")
    drafts = raw.get("draft_vocab_size") or text.vocab
    own = raw.get("eagle_config") if isinstance(raw.get("eagle_config"), dict) else {}
    taps = _taps_of(raw, own or {}, target, f"{flag}: {Path(path).name}")
    first = bool(raw.get("norm_before_residual", False))
    kept = dataclasses.replace(text, vocab=int(drafts), tied=False, kv=None)
    return EagleConfig(Path(path), kept, taps, first)


def _check_sizes(raw: JsonMapping, text: TextConfig, target: ModelConfig, length: int, what: str) -> None:
    """Raises StartupError unless a head with these sizes reads the hidden states and ids of ``target``."""
    wanted = target.text
    hidden = raw.get("target_hidden_size") or text.hidden
    if hidden != wanted.hidden or text.hidden != wanted.hidden:
        size = hidden if hidden != wanted.hidden else text.hidden
        raise StartupError(f"{what} is a head for hidden size {size}; {target.name} has {wanted.hidden}")
    if text.vocab != wanted.vocab:
        raise StartupError(f"{what} has {text.vocab} ids and {target.name} has {wanted.vocab}")
    if text.layers != 1:
        raise StartupError(f"{what} has {text.layers} layers; a head of eagle3 has one")
    drafts = raw.get("draft_vocab_size") or text.vocab
    if not isinstance(drafts, int) or not 0 < drafts <= text.vocab:
        raise StartupError(f"{what}: draft_vocab_size must be a whole number in [1, {text.vocab}], got {drafts!r}")
    if text.max_positions < length:
        raise StartupError(f"{what} has {text.max_positions} positions; --max-model-len {text.max_positions} would do")


def _taps_of(raw: JsonMapping, own: JsonMapping, target: ModelConfig, what: str) -> tuple[int, ...]:
    """Returns the layers that the head names, else those near the start, the middle and the end."""
    layers = target.text.layers
    named = own.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    if named is None:
        return tuple(min(max(at, 0), layers - 1) for at in (2, layers // 2, layers - 3))
    whole = isinstance(named, list) and all(isinstance(at, int) and 0 <= at < layers for at in named)
    if not whole or len(named) != STATES:
        raise StartupError(f"{what} names layers {named}; {STATES} of {layers} are read")
    return tuple(named)
