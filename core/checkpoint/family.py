"""A model family as one frozen record: config parser, weight names, and the function that builds the model.

Torch-free, because the API process and ``trencadis plan`` read it. Families of other packages are found by the
entry-point group ``trencadis.models`` (core/checkpoint/model_registry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.checkpoint.pooling_description import LAST
from trencadis.core.vision_config import VisionConfig

GENERATE, CLASSIFY, BARE = "generate", "classify", "bare"
"""The part of an architecture after the decoder: an output head, a class head (``score``), nothing."""


@dataclass(frozen=True)
class StoredNames:
    """Maps the names stored in a checkpoint to the canonical ones that layers use.

    Canonical: ``embed_tokens``, ``embed_positions``, ``embed_types``, ``embed_norm``, ``project_in``, ``project_out``,
    ``norm``, ``lm_head``, ``score``, ``score_dense``, and in ``layers.0``: ``input_layernorm``,
    ``post_attention_layernorm`` (before the MLP), for norms after attention and MLP ``{attention,mlp}_out_layernorm``,
    ``self_attn.{q,k,v,o}_proj``, ``self_attn.{q,k}_norm``, ``mlp.{gate,up,down}_proj``; in cross-attention layers
    ``cross_attn`` instead of ``self_attn``, and ``cross_attn_{attn,mlp}_gate``; with experts ``mlp.gate`` and
    ``mlp.experts.0.{gate,up,down}_proj``, which may also be stored as ``mlp.experts.gate_up_proj`` and ``down_proj``,
    [experts, out, in]. Stored ``qkv_proj`` and ``gate_up_proj`` are split into their parts.

    Args:
        prefixes: stored prefix -> canonical one; the first match applies, names without a match are ignored.
        inner: (stored, canonical) parts of the remaining name, with dots at both ends.
        transposed: canonical modules whose weights are stored as [in, out]; for experts' tensors, those that may be.
        alternating: True if experts are stored as [experts, in, out], and gates and ups alternate in the outputs of
            ``gate_up_proj``; or as MXFP4, ``_blocks`` and ``_scales``, by rows. Biases end in ``_bias``.
    """

    prefixes: Mapping[str, str]
    inner: tuple[tuple[str, str], ...] = ()
    transposed: tuple[str, ...] = ()
    alternating: bool = False


@dataclass(frozen=True)
class VisionSide:
    """Torch-free functions of a multimodal family, as ``module:function`` or ``module:object.method``.

    Args:
        needs: (ModelConfig, ``--mm-processor-kwargs``, alignment) -> ``ImageNeeds``.
        sizes: (ModelConfig or None, ``--mm-processor-kwargs``, alignment) ->
        ``multimodal.processor_interface.ImageGeometry``,
            the sizes of an image by height and width.
        processor: (ModelConfig, ``--mm-processor-kwargs``, alignment) -> the checkpoint's image processor.
        tokens: keys of config.json -> names of these media tokens in every tokenizer of the family.
        expand: inserts placeholders into a prompt.
        positions: (tokens, spans of whole media, the tower, seconds between temporal patches) -> rotary positions on
            three axes, and their offset after the prompt; empty: a token's position is its index.
        times: PreparedVideo -> a text for each temporal patch; each patch then follows its text, enclosed in its own
            media marks. Empty: the patches of a video are adjacent.
        around: texts before and after an image's mark in a prompt; they are tokenised together with the surrounding
            text.
        numbered: texts before and after an image's number in a raw prompt, if marks are numbered texts instead of
            tokens. Texts between images are then tokenised separately, each as a prompt.
        windows: True if the tower has windows of 8 x 8 patches, so that images can be resized to whole windows.
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
    """The class head of an architecture: ``score``, preceded by ``score_dense`` [hidden, hidden] if ``inner`` is set.

    Args:
        kind: the hidden states that it pools.
        inner: activation between the two linear layers, ``relu`` or ``tanh``; "": there is one layer.
        biased: True if the linear layers have biases.
        classes: number of classes; 0: from config.json.
        activation: maps scores to probabilities; "": from config.json.
        step_tag: id of the tokens whose scores are returned; -1: all.
    """

    kind: str = LAST
    inner: str = ""
    biased: bool = False
    classes: int = 0
    activation: str = ""
    step_tag: int = -1


@dataclass(frozen=True)
class ParsedConfig:
    """The result of a family's config parser; ``media``: ids of its media tokens by key."""

    text: TextConfig
    vision: VisionConfig | None = None
    media: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceShare:
    """One of ``ranks`` devices that hold a model; ``quantised``: ``Policy.quantised``."""

    itemsize: int
    ranks: int
    quantised: str = ""


ATTENTION, MLPS, TOWER, RECURRENT = "attention", "MLPs", "vision tower", "recurrent layers"
"""Parts of a model that take LoRA adapters, as ``trencadis models`` names them."""
EVERY_PART = (ATTENTION, MLPS, TOWER)
HYBRID, HYBRID_MOE = (ATTENTION, MLPS, RECURRENT), (ATTENTION, RECURRENT)
"""Parts of models with recurrent layers, whose layers have MLPs, or experts."""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        name: name in the list of ``trencadis models``.
        model_type: value in config.json, by which transformers selects the model regardless of ``architectures``.
        architectures: names in config.json -> GENERATE, CLASSIFY or BARE.
        config: (the file, its decoder's part, whether the head is tied) -> ``ParsedConfig``. Torch-free and strict:
            each key that can change a result is used, checked against the implemented values, or refused.
        names: names of the weights.
        make: ``module:function`` of (ModelConfig, Backend), which may import torch.
        weights: computes the bytes of the weights on one device; None: derived from ``config``.
        values: computes the number of weights applied to one token in all layers, for costs; None: derived from
            ``config``.
        vision: functions for images and videos; None: text only.
        pooling: default kind of pooling for embeddings; None: this family does not pool.
        heads: class heads of architectures, unless it is one linear layer without bias over the last token.
        tied: default of ``tie_word_embeddings``.
        ignored: keys of config.json that change no result here.
        skipped: prefixes of stored weights that are not loaded, such as those of a draft layer; a log line counts them.
        adapters: parts of the model whose LoRA adapters can be kept beside it (``ATTENTION``, ``MLPS``, ``TOWER``,
            ``RECURRENT``); empty: none.
        defaults: device options for which this family has other defaults: ``fp32_softmax`` (softmax of text in
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
    skipped: tuple[str, ...] = ()
    adapters: tuple[str, ...] = (ATTENTION, MLPS)
    defaults: Mapping[str, bool] = field(default_factory=dict)
