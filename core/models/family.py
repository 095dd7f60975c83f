"""A model family as one frozen record: what its checkpoints say, how its weights are called, who makes the model.

Torch-free, because the API process and ``trencadis plan`` read it. A family of another package is found by the
entry-point group ``trencadis.models`` (core/models/registry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trencadis.core.checkpoint.fields import Fields
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig, VisionConfig
from trencadis.core.checkpoint.pooling import LAST

GENERATE, CLASSIFY, BARE = "generate", "classify", "bare"
"""What an architecture has behind the decoder: an output head, a class head (``score``), nothing."""


@dataclass(frozen=True)
class StoredNames:
    """From the names that a checkpoint stores to the canonical ones, which layers ask for.

    Canonical: ``embed_tokens``, ``embed_positions``, ``project_in``, ``project_out``, ``norm``, ``lm_head``, ``score``,
    and in ``layers.0``: ``input_layernorm``, ``post_attention_layernorm``, which stands before the MLP, and for norms
    behind both ``{attention,mlp}_out_layernorm``, ``self_attn.{q,k,v,o}_proj``, ``self_attn.{q,k}_norm``,
    ``mlp.{gate,up,down}_proj``; where there are experts ``mlp.gate`` and ``mlp.experts.0.{gate,up,down}_proj``, which
    may also be stored as ``mlp.experts.gate_up_proj`` and ``down_proj``, [experts, out, in]. Stored ``qkv_proj`` and
    ``gate_up_proj`` are cut into those.

    Args:
        prefixes: stored prefix -> canonical one; the first that matches counts, names without one are ignored.
        inner: (stored, canonical) parts of what is left, with dots at both ends.
        transposed: canonical modules whose weights are stored [in, out].
    """

    prefixes: Mapping[str, str]
    inner: tuple[tuple[str, str], ...] = ()
    transposed: tuple[str, ...] = ()


@dataclass(frozen=True)
class VisionSide:
    """Torch-free functions of a family that sees, as ``module:function``.

    Args:
        needs: ``core.models.registry.image_needs``.
        expand: puts placeholders into a prompt.
        positions: the rotary positions of a prompt with media.
    """

    needs: str
    expand: str
    positions: str


@dataclass(frozen=True)
class Described:
    """What a family's parser makes of config.json; ``media``: ids of its media tokens by key."""

    text: TextConfig
    vision: VisionConfig | None = None
    media: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """One of ``ranks`` devices that hold a model; ``quantised``: ``Policy.quantised``."""

    itemsize: int
    ranks: int
    quantised: str = ""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        name: as ``trencadis models`` lists it.
        model_type: of config.json; transformers builds the model that it names, whatever ``architectures`` says.
        architectures: of config.json -> GENERATE, CLASSIFY or BARE.
        config: (the file, its decoder's part, whether the head is tied) -> what it describes. Torch-free and strict:
            each key that can change a result is used, held to what is implemented, or refused.
        names: of the weights.
        make: ``module:function`` of (ModelConfig, Backend), which may import torch.
        weights: bytes of the weights on one device; None: by the parts that ``config`` describes.
        values: weights that one token is multiplied by in all layers, for costs; None: by the parts.
        vision: functions for pictures and videos; None: text alone.
        pooling: which hidden row embeddings take where nothing else says so; None: this family does not pool.
        tied: whether the head is tied where config.json does not say.
        ignored: keys of config.json that change no result here.
        defaults: names of device options that this family wants otherwise: ``fp32_softmax`` (softmax of text in
            float32), ``block_adjustment`` (blocks of a decoding row joined by a fused kernel).
    """

    name: str
    model_type: str
    architectures: Mapping[str, str]
    config: Callable[[Fields, Fields, bool], Described]
    names: StoredNames
    make: str = "trencadis.core.models.decoder:make"
    weights: Callable[[ModelConfig, Held], int] | None = None
    values: Callable[[ModelConfig], int] | None = None
    vision: VisionSide | None = None
    pooling: str | None = LAST
    tied: bool = False
    ignored: frozenset[str] = frozenset()
    defaults: Mapping[str, bool] = field(default_factory=dict)
