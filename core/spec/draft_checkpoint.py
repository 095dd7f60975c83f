"""Reads and checks the checkpoint of a draft model, or the configuration of an EAGLE-3 head. Torch-free.

They are those of ``--speculative-config`` with method ``draft_model`` and ``eagle3``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.checkpoint.model_config import POST, ModelConfig, TextConfig
from trencadis.core.checkpoint.model_registry import PLAIN_DECODER
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.core.operator_files import expand_path
from trencadis.core.spec.spec_config import EAGLE3, draft_flag, requested_speculation
from trencadis.core.weight_files import HEAD_STATES, HEAD_TABLE, stores_tensor

HEAD = "Eagle3"
"""What the names of architectures of heads contain; the rest of a name is that of the target."""


@dataclass(frozen=True)
class EagleConfig:
    """A head that drafts from hidden states of the target model.

    Args:
        sizes: a plain decoder of the head's layer, whose vocabulary is that of drafts.
        taps: layers of the target before which the residual stream is read.
        norm_first: the residual stream of the head begins with the normed hidden state.
        vocab: ids of the target.
        own_table: True if it has an embedding of its own.
    """

    path: Path
    sizes: ModelConfig
    taps: tuple[int, ...]
    norm_first: bool = False
    vocab: int = 0
    own_table: bool = False

    @property
    def text(self) -> TextConfig:
        """The configuration of the layer."""
        return self.sizes.text


Drafter = ModelConfig | EagleConfig
"""A smaller model or a head that drafts for a model."""


def sizes_of(drafter: Drafter) -> ModelConfig:
    """Returns a model whose KV cache has the sizes of what drafts."""
    return drafter.sizes if isinstance(drafter, EagleConfig) else drafter


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
    sizes = dataclasses.replace(
        target, path=Path(path), architecture=PLAIN_DECODER, text=kept, vision=None, pooling=None, quant=None
    )
    return EagleConfig(Path(path), sizes, taps, first, wanted.vocab, stores_tensor(Path(path), HEAD_TABLE))


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
    if not whole or len(named) != HEAD_STATES:
        raise StartupError(f"{what} names layers {named}; {HEAD_STATES} of {layers} are read")
    return tuple(named)


def find_drafter(config: EngineConfig, target: ModelConfig) -> Drafter | None:
    """Reads the configuration of the draft model or head that the flags name; None: they name none.

    Raises:
        StartupError: it cannot draft for ``target``; one line.
    """
    asked = requested_speculation(config)
    if asked is None or not asked.model:
        return None
    load = load_eagle_config if asked.method == EAGLE3 else load_draft_config
    return load(config, asked.model, target, draft_flag(config))


def load_draft_config(config: EngineConfig, path: str, target: ModelConfig, flag: str) -> ModelConfig:
    """Returns the text model of the draft checkpoint at ``path``, a local folder; images are ids to it.

    Args:
        target: the model that verifies.
        flag: how the user wrote the draft, for messages.

    Raises:
        StartupError: it cannot draft for ``target``; one line.
    """
    folder = expand_path(path)
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise StartupError(
                f"{flag}: {path} is a LoRA adapter, and a draft model takes none: it drafts as the base, and the "
                "adapter of a request verifies"
            )
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
