"""A checkpoint's configuration as frozen values; ``core.checkpoint.config_reader`` reads it. Torch-free.

The part of a model that one pipeline stage holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint.decoder_layer_config import CHUNK as CHUNK
from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig as ExpertsConfig
from trencadis.core.checkpoint.decoder_layer_config import FullHeads as FullHeads
from trencadis.core.checkpoint.decoder_layer_config import QueryGrowth as QueryGrowth
from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig as RecurrentConfig
from trencadis.core.checkpoint.pooling_description import Pooling
from trencadis.core.checkpoint.quant_config import Quantisation
from trencadis.core.checkpoint.rope_config import LongScaling, Scaling, YarnScaling
from trencadis.core.kv_cache_format import KVFormat
from trencadis.core.media_spans import RESERVED_ROWS
from trencadis.core.vision_config import VisionConfig

LAYER_INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
"""Canonical names of what makes the embeddings for each layer."""


@dataclass(frozen=True)
class StageShare:
    """Layers [first, stop) of a decoder on stage ``stage`` of ``stages``.

    The first stage also holds the vision tower, the arena with its output rows and the embedding; the last one also
    holds the final norm, the head and the sampler state.
    """

    first: int
    stop: int
    stage: int = 0
    stages: int = 1

    @cached_property
    def starts(self) -> bool:
        """True on the first stage, where tokens are embedded."""
        return self.stage == 0

    @cached_property
    def ends(self) -> bool:
        """True on the last stage, where tokens are sampled."""
        return self.stage == self.stages - 1

    @property
    def layers(self) -> range:
        """The decoder layers of this stage."""
        return range(self.first, self.stop)

    def holds(self, name: str) -> bool:
        """Returns True if this stage needs a weight, given its canonical name.

        The embedding table counts for the last stage, too, since it may be tied to the head.
        """
        top, _, rest = name.partition(".")
        if top == "layers":
            number = rest.partition(".")[0]
            return not number.isdigit() or int(number) in self.layers
        if top in ("norm", "lm_head", "project_out", "score", "score_dense"):
            return self.ends
        if top == "visual" or top in ("project_in", "embed_positions", "embed_types", "embed_norm", *LAYER_INPUTS):
            return self.starts
        return self.starts or self.ends


RMS, RMS_ONE, LAYER = "rms", "rms_one", "layer"
"""Norms: x / rms(x) * weight; the same times 1 + weight, in float32; (x - mean) / deviation * weight + bias."""

PRE, POST, SANDWICH, OUT = "pre", "post", "sandwich", "out"
"""Position of the norms: before attention and MLP; after the residual sums; both before and after attention and MLP;
or after attention and MLP alone, before the sums.
"""

GATED, PLAIN = "gated", "plain"
"""Kinds of MLP: down(act(gate) * up); down(act(up))."""


@dataclass(frozen=True)
class TextConfig:
    """The decoder. All layers are alike, except which of them have ``experts``, windows, cross-attention or a state.

    ``of_layer`` returns the configuration of one layer where its sizes differ from those of others.

    Args:
        eps: epsilon of every norm.
        tied: True if the head shares the embedding table.
        mrope_section: number of frequencies of each of three position axes; None: there is one axis.
        interleaved: True if the frequencies of the axes alternate; the first axis gets the remaining ones.
        rotary: True if heads are rotated by position.
        rotary_dim: rotated values of a head; 0: all. Half of them are at the start of each half of the head.
        adjacent_pairs: True if the two values of a rotated pair are adjacent, not half of the rotated part apart.
        unrotated_layers: layers without rotary positions in a model that has them.
        query_growth: growth of queries with their position; None: there is none.
        joint_qk_norm: True if q and k each have one norm over all their heads.
        scale: factor of the attention scores; 0: head_dim ** -0.5.
        table: width of embedding and head if it is not ``hidden``; two matrices then project in and out. 0: ``hidden``.
        learned: rows of the table of learned positions that is added to the embeddings; 0: none.
        position_offset: row of position 0 in that table.
        types: rows of a table of token types that is added too, followed by a norm; 0: neither. A token's type is its
            second position minus its first.
        pad: the token id that takes no position; -1: none.
        kv: format of the KV cache; None: the engine's dtype.
        residual_scale: factor of the outputs of attention and MLP before they are added to the residual stream.
        logit_scale: factor of the logits.
        window: keys that a token attends to, itself included; 0: all.
        full_layers: layers with full attention in spite of ``window``.
        local_theta: rotary base of the layers with a window, without scaling; 0: all layers share one table.
        bidirectional_images: True if tokens of an image attend to all tokens of that image, also later ones.
        causal_full_layers: True if they do so in layers with a window alone.
        sinks: True if each head has a further score that counts in the softmax and has no value.
        causal: True if a token attends only to earlier ones; False: to its whole row, and prompts are not chunked.
        experts: None: every layer has one MLP.
        cross_attention_layers: layers that attend to image rows instead of tokens; they have no KV cache.
        spare: rows of the embedding table beyond the vocabulary, for ids that are never sampled.
        recurrent: layers with a state of fixed size, which have no KV cache; None: there are none.
        output_gate: True if the output of attention is multiplied by the sigmoid of a gate, stored after each query
            head in ``q_proj``.
        full_heads: heads of the layers with full attention; None: those of all layers are alike.
        keys_as_values: as in ``FullHeads``, for all layers.
        v_norm: True if each head of v is divided by its root mean square.
        layer_scale: True if each layer's output, residual stream included, is multiplied by a stored number.
        logit_cap: logits become cap * tanh(logits / cap); 0: they stay as they are.
        shared_kv: number of last layers that read keys and values of an earlier layer (``kv_source``) and have none.
        wide_readers: True if the MLP of these layers is twice as wide.
        reads_kv: True in what ``of_layer`` returns for these layers.
        mlp_layers: layers that are an MLP or experts alone; the others are then attention or a recurrent layer alone,
            and each layer has one norm, before its part. None: each layer has both.
        layer_inputs: width of a second embedding of each token for each layer, which a gate of the layer weighs; 0:
            there are none. ``layer_vocab``: rows of its table; ``layer_pad``: the id whose row image tokens take.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    mrope_section: tuple[int, int, int] | None = None
    interleaved: bool = False
    rope_scaling: Scaling | None = None
    out_bias: bool = False
    mlp_bias: bool = False
    kv: KVFormat | None = None
    norm: str = RMS
    norm_placement: str = PRE
    final_norm: bool = True
    qk_norm: bool = False
    joint_qk_norm: bool = False
    mlp: str = GATED
    activation: str = "silu"
    rotary: bool = True
    rotary_dim: int = 0
    adjacent_pairs: bool = False
    unrotated_layers: tuple[int, ...] = ()
    query_growth: QueryGrowth | None = None
    scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    table: int = 0
    learned: int = 0
    position_offset: int = 0
    types: int = 0
    pad: int = -1
    window: int = 0
    full_layers: tuple[int, ...] = ()
    local_theta: float = 0.0
    bidirectional_images: bool = False
    causal_full_layers: bool = False
    sinks: bool = False
    causal: bool = True
    experts: ExpertsConfig | None = None
    cross_attention_layers: tuple[int, ...] = ()
    spare: int = 0
    recurrent: RecurrentConfig | None = None
    output_gate: bool = False
    full_heads: FullHeads | None = None
    keys_as_values: bool = False
    v_norm: bool = False
    layer_scale: bool = False
    logit_cap: float = 0.0
    shared_kv: int = 0
    wide_readers: bool = False
    reads_kv: bool = False
    mlp_layers: tuple[int, ...] | None = None
    layer_inputs: int = 0
    layer_vocab: int = 0
    layer_pad: int = 0

    def of_layer(self, layer: int) -> TextConfig:
        """Returns this configuration with the sizes of one layer: its heads and its MLP."""
        if self.full_heads is None and not self.shared_kv:
            return self
        return _config_of_layer(self, not self.window_of(layer), layer >= self.layers - self.shared_kv)

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer reads: its own, or the last one before the readers that has
        the same kind of attention.
        """
        first = self.layers - self.shared_kv
        if layer < first:
            return layer
        return max(i for i in range(first) if self.window_of(i) == self.window_of(layer))

    @property
    def kv_givers(self) -> tuple[int, ...]:
        """The layers whose keys and values later layers read."""
        return tuple(sorted({self.kv_source(i) for i in range(self.layers - self.shared_kv, self.layers)}))

    @property
    def layer_forms(self) -> tuple[TextConfig, ...]:
        """The distinct values of ``of_layer``, those of layers with full attention first."""
        return _layer_forms(self) if self.full_heads is not None or self.shared_kv else (self,)

    @property
    def same_heads(self) -> bool:
        """True if the KV caches of all layers have one shape."""
        own = self.full_heads
        return own is None or (own.kv_heads, own.head_dim) == (self.kv_heads, self.head_dim)

    @property
    def full_head_dim(self) -> int:
        """Size of a head in the layers with full attention."""
        return self.head_dim if self.full_heads is None else self.full_heads.head_dim

    @property
    def sums_stream(self) -> bool:
        """True if layers take and return the residual stream as one tensor, with their own output added."""
        return self.norm_placement in (POST, OUT) or self.layer_scale or self.layer_inputs > 0

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a state of fixed size."""
        return () if self.recurrent is None else self.recurrent.layers

    @property
    def cached_layers(self) -> int:
        """Number of layers with a KV cache."""
        return len(self.kv_layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with a KV cache."""
        others = {*self.cross_attention_layers, *self.recurrent_layers, *(self.mlp_layers or ())}
        return tuple(layer for layer in range(self.layers - self.shared_kv) if layer not in others)

    @property
    def query_width(self) -> int:
        """Rows of ``q_proj`` for each query head: the query, and its gate if there is one."""
        return self.head_dim * (2 if self.output_gate else 1)

    @property
    def key_parts(self) -> int:
        """Number of projections of keys and values, as wide as all keys."""
        return 0 if self.reads_kv else 1 if self.keys_as_values else 2

    @property
    def layer_input_values(self) -> int:
        """Number of weights that a layer's own embeddings are multiplied by: its gate and its projection."""
        return 2 * self.hidden * self.layer_inputs

    @property
    def attention_values(self) -> int:
        """Number of weights of a layer's attention, without norms and biases."""
        keys = self.key_parts * self.kv_heads * self.head_dim
        return self.hidden * (self.heads * (self.query_width + self.head_dim) + keys)

    @property
    def long_from(self) -> int:
        """Longest request, in tokens, that uses the short factors of LongRoPE; 0: there is one table."""
        return self.rope_scaling.original_max_position if isinstance(self.rope_scaling, LongScaling) else 0

    @property
    def dense_layers(self) -> int:
        """Number of layers with an MLP of their own, in place of experts or beside them."""
        return sum(map(self.has_mlp, range(self.layers)))

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.has_experts, range(self.layers)))

    def mixes_tokens(self, layer: int) -> bool:
        """Returns True if a layer has attention or a recurrent layer."""
        return self.mlp_layers is None or layer not in self.mlp_layers

    def has_experts(self, layer: int) -> bool:
        """Returns True if a layer has experts."""
        if self.experts is None or layer in self.experts.dense:
            return False
        return self.mlp_layers is None or layer in self.mlp_layers

    def has_mlp(self, layer: int) -> bool:
        """Returns True if a layer has an MLP of its own, in place of experts or beside them."""
        if self.mlp_layers is not None and layer not in self.mlp_layers:
            return False
        return self.experts is None or self.experts.beside or layer in self.experts.dense

    def window_of(self, layer: int) -> int:
        """Returns the sliding window of a layer in keys; 0: full attention."""
        return 0 if layer in self.full_layers else self.window

    @property
    def second_rotary(self) -> bool:
        """True if some layers have a rotary table of their own (``uses_second_rotary``)."""
        return bool(self.local_theta or self.unrotated_layers)

    def uses_second_rotary(self, layer: int) -> bool:
        """Returns True if a layer has the table of layers with a window, or that of layers without positions."""
        return layer in self.unrotated_layers or bool(self.window_of(layer) and self.local_theta)

    def score_scale_of(self, layer: int) -> float:
        """Returns the factor of a layer's attention scores; it is not YaRN's in a layer of the second table."""
        plain = self.uses_second_rotary(layer) and isinstance(self.rope_scaling, YarnScaling)
        return self.head_dim**-0.5 if plain or layer in self.unrotated_layers else self.score_scale

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of all layers, ascending."""
        return tuple(sorted({self.window_of(i) for i in range(self.layers)}))

    @property
    def upto(self) -> bool:
        """True if a token may attend to later positions (``Attn.upto``)."""
        return not self.causal or self.bidirectional_images

    @property
    def width(self) -> int:
        """Width of the embedding table, of an image's tokens and of the rows that the head reads."""
        return self.table or self.hidden

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        return self.scale or self.head_dim**-0.5


@cache
def _layer_forms(c: TextConfig) -> tuple[TextConfig, ...]:
    kinds = sorted((bool(c.window_of(layer)), layer) for layer in range(c.layers))
    return tuple(dict.fromkeys(c.of_layer(layer) for _, layer in kinds))


@cache
def _config_of_layer(c: TextConfig, full: bool, reads: bool) -> TextConfig:
    """Returns ``c`` with the sizes of its layers with full attention, or of the others, and of those that read the keys
    of an earlier layer.
    """
    heads = c.full_heads._asdict() if full and c.full_heads is not None else {}
    inner = c.intermediate * (2 if reads and c.wide_readers else 1)
    return replace(c, full_heads=None, shared_kv=0, reads_kv=reads, intermediate=inner, **heads)


@dataclass(frozen=True)
class ModelConfig:
    """Facts about a checkpoint that the engine needs.

    ``dtype``: type of its 16- or 32-bit weights; ``quant``: format of the quantised ones. ``pooling`` None: the model
    generates. ``unread``: unknown keys of config.json. ``template_token``: the token that the chat template inserts for
    an image if it is not ``image_token``. ``part``: the share of a pipeline stage; None: everything.
    ``encoder_data_parallel``: each rank has the whole tower, and images are distributed over the ranks.
    """

    path: Path
    architecture: str
    text: TextConfig
    vision: VisionConfig | None
    dtype: str
    eos: tuple[int, ...]
    image_token: int = -1
    video_token: int = -1
    vision_start: int = -1
    vision_end: int = -1
    quant: Quantisation | None = None
    pooling: Pooling | None = None
    unread: tuple[str, ...] = ()
    part: StageShare | None = None
    encoder_data_parallel: bool = False
    template_token: int = -1

    @property
    def share(self) -> StageShare:
        """The part of the model on this stage."""
        return self.part or StageShare(0, self.text.layers)

    @property
    def cached(self) -> tuple[int, ...]:
        """The layers of this stage that have a KV cache."""
        return tuple(layer for layer in self.text.kv_layers if layer in self.share.layers)

    @property
    def recurrent(self) -> tuple[int, ...]:
        """The layers of this stage that keep a state of fixed size for each sequence."""
        return tuple(layer for layer in self.share.layers if layer in self.text.recurrent_layers)

    @property
    def encodes_images(self) -> bool:
        """True if this stage holds the vision tower."""
        return self.vision is not None and self.share.starts

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return self.path.name

    @property
    def placeholder_token(self) -> int:
        """The id that stands for an image in a rendered chat template; -1: there is none."""
        return self.template_token if self.template_token >= 0 else self.image_token

    @property
    def row_parts(self) -> int:
        """How many rows of the arena's tensor, each as wide as an embedding, form one arena row."""
        return 1 if self.vision is None else 1 + self.vision.deepstack

    def alignment_unit(self, unit: int) -> int:
        """Returns the unit that product widths are padded to on a device whose unit is ``unit``.

        The result is 1 if columns are quantised in groups, because zeros appended to a group would change it.
        """
        return unit if self.quant is None or self.quant.widest_group() == 1 else 1


class SquareImage(NamedTuple):
    """A square image: its side in pixels, its patches and its slots."""

    side: int
    patches: int
    slots: int


def reserved_rows(config: ModelConfig) -> int:
    """Returns the number of arena rows that no item gets: ZERO, SINK, and those that are the same for every image."""
    return RESERVED_ROWS + (0 if config.vision is None else config.vision.constants)


@dataclass(frozen=True)
class ImageNeeds:
    """Limits of images: slots and tokens of the largest, slots of the smallest; all 0 without a tower.

    ``images``: (slots of one image, fewest, most at a time) for each size that the user named; 0 images: as many as a
    prompt may hold. ``tile``: slots of every image if all are equal; 0: they differ. ``squares``: the smallest square
    image for each number of slots, ascending.
    """

    slots: int = 0
    least_slots: int = 0
    tokens: int = 0
    images: tuple[tuple[int, int, int], ...] = ()
    tile: int = 0
    squares: tuple[SquareImage, ...] = ()
