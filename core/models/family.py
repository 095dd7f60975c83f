"""A model family as one frozen record: what its checkpoints say, how its weights are called, who makes the model.

Torch-free, because the API process and ``trencadis plan`` read it. A family of another package is found by the
entry-point group ``trencadis.models`` (core/models/registry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.checkpoint.pooling_config import LAST
from trencadis.core.checkpoint.vision_config import VisionConfig

GENERATE, CLASSIFY, BARE = "generate", "classify", "bare"
"""What an architecture has behind the decoder: an output head, a class head (``score``), nothing."""


@dataclass(frozen=True)
class StoredNames:
    """From the names that a checkpoint stores to the canonical ones, which layers ask for.

    Canonical: ``embed_tokens``, ``embed_positions``, ``embed_types``, ``embed_norm``, ``project_in``, ``project_out``,
    ``norm``, ``lm_head``, ``score``, ``score_dense``, and in ``layers.0``: ``input_layernorm``,
    ``post_attention_layernorm``, which stands before the MLP, and for norms behind both
    ``{attention,mlp}_out_layernorm``, ``self_attn.{q,k,v,o}_proj``, ``self_attn.{q,k}_norm``,
    ``mlp.{gate,up,down}_proj``; in layers that attend to images ``cross_attn`` in place of ``self_attn``, and
    ``cross_attn_{attn,mlp}_gate``; where there are experts ``mlp.gate`` and ``mlp.experts.0.{gate,up,down}_proj``,
    which may also be stored as ``mlp.experts.gate_up_proj`` and ``down_proj``, [experts, out, in]. Stored ``qkv_proj``
    and ``gate_up_proj`` are cut into those.

    Args:
        prefixes: stored prefix -> canonical one; the first that matches counts, names without one are ignored.
        inner: (stored, canonical) parts of what is left, with dots at both ends.
        transposed: canonical modules whose weights are stored [in, out]; of experts' tensors, those that may be.
    """

    prefixes: Mapping[str, str]
    inner: tuple[tuple[str, str], ...] = ()
    transposed: tuple[str, ...] = ()


@dataclass(frozen=True)
class VisionSide:
    """Torch-free functions of a multimodal family, as ``module:function``.

    Args:
        needs: (ModelConfig, ``--mm-processor-kwargs``, alignment) -> ``ImageNeeds``.
        sizes: (ModelConfig or None, ``--mm-processor-kwargs``, alignment) -> what an image becomes by height and width,
            ``multimodal.processor.ImageGeometry``.
        processor: (ModelConfig, ``--mm-processor-kwargs``, alignment) -> the checkpoint's image processor.
        tokens: keys of config.json -> names of those media tokens in every tokenizer of the family.
        expand: puts placeholders into a prompt.
        positions: (tokens, spans of whole media, the tower, seconds between temporal patches) -> rotary positions on
            three axes, and what to add beyond the prompt; empty: a token's position is its index.
        times: PreparedVideo -> a text for each of its temporal patches, which stand apart behind these texts, between
            the marks of a medium of its own; empty: the patches of a video follow each other.
        around: what stands before and behind an image's mark in a prompt's text; it is encoded with the text around.
        numbered: what stands before and behind an image's number in a raw prompt, where marks are numbered texts, no
            tokens. Texts between images are then encoded by themselves, each as a prompt.
        windows: whether the tower has windows of 8 x 8 patches, so that images can be resized to whole ones.
    """

    needs: str
    sizes: str
    processor: str
    tokens: Mapping[str, str]
    expand: str = "trencadis.multimodal.placeholders:expand_placeholders"
    positions: str = ""
    times: str = ""
    around: tuple[str, str] = ("", "")
    numbered: tuple[str, str] = ("", "")
    windows: bool = False


@dataclass(frozen=True)
class ClassHead:
    """The class head of an architecture: ``score``, behind ``score_dense`` [hidden, hidden] where ``inner`` is set.

    Args:
        kind: the rows that it reads.
        inner: activation between the two linears, ``relu`` or ``tanh``; "": one linear.
        biased: whether they have biases.
        classes: how many; 0: as config.json says.
        activation: from scores to probabilities; "": as config.json says.
        step_tag: id of the tokens whose scores are answered; -1: all.
    """

    kind: str = LAST
    inner: str = ""
    biased: bool = False
    classes: int = 0
    activation: str = ""
    step_tag: int = -1


@dataclass(frozen=True)
class ParsedConfig:
    """What a family's parser makes of config.json; ``media``: ids of its media tokens by key."""

    text: TextConfig
    vision: VisionConfig | None = None
    media: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceShare:
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
        vision: functions for images and videos; None: text alone.
        pooling: which hidden row embeddings take where nothing else says so; None: this family does not pool.
        heads: class heads of architectures that are not one linear without biases over the last token.
        tied: whether the head is tied where config.json does not say.
        ignored: keys of config.json that change no result here.
        defaults: names of device options that this family wants otherwise: ``fp32_softmax`` (softmax of text in
            float32), ``block_adjustment`` (blocks of a decoding row joined by a fused kernel).
    """

    name: str
    model_type: str
    architectures: Mapping[str, str]
    config: Callable[[JsonFields, JsonFields, bool], ParsedConfig]
    names: StoredNames
    make: str = "trencadis.core.models.decoder:make"
    weights: Callable[[ModelConfig, DeviceShare], int] | None = None
    values: Callable[[ModelConfig], int] | None = None
    vision: VisionSide | None = None
    pooling: str | None = LAST
    heads: Mapping[str, ClassHead] = field(default_factory=dict)
    tied: bool = False
    ignored: frozenset[str] = frozenset()
    defaults: Mapping[str, bool] = field(default_factory=dict)
