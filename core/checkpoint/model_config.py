"""A checkpoint's configuration as frozen values; ``core.checkpoint.config_reader`` reads it. Torch-free.

The part of a model that one pipeline stage holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint.pooling_config import Pooling
from trencadis.core.checkpoint.quant_config import Quantisation
from trencadis.core.checkpoint.rope_config import LongScaling, Scaling, YarnScaling
from trencadis.core.kv_cache_format import KVFormat
from trencadis.core.shared_constants import RESERVED_ROWS
from trencadis.core.vision_config import VisionConfig


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
        if top == "visual" or top in ("project_in", "embed_positions", "embed_types", "embed_norm"):
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
class ExpertsConfig:
    """The experts of a decoder's layers: gated MLPs, a few of which are applied to each token.

    Args:
        count: experts of a layer.
        top: experts per token.
        inner: intermediate size of an expert.
        normalise: if True, the weights of a token's experts are divided by their sum.
        dense: layers that have one MLP of ``TextConfig.intermediate`` columns instead.
        shared: intermediate size of the shared expert, which every token gets; 0: there is none.
        shared_gate: True if the shared expert's output is multiplied by the sigmoid of a score of the token.
        bias: True if the router and the experts have biases.
    """

    count: int
    top: int
    inner: int
    normalise: bool
    dense: tuple[int, ...] = ()
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False

    def values(self, hidden: int, ranks: int = 1, only: int = 0) -> int:
        """Returns the number of weights of one layer on one of ``ranks`` devices, router included.

        ``only``: count just that many experts.
        """
        return hidden * (self.count + 3 * (only or self.count) * -(-self.inner // ranks))

    def bias_values(self, hidden: int, ranks: int) -> int:
        """Returns the number of biases of one layer's router and experts on one of ``ranks`` devices."""
        return self.count * (1 + 2 * -(-self.inner // ranks) + hidden) if self.bias else 0

    def shared_values(self, hidden: int, columns: int = 0) -> int:
        """Returns the number of weights of a layer's shared expert and its gate.

        ``columns``: those of one device; 0: all.
        """
        return hidden * (3 * (columns or self.shared) + self.shared_gate) if self.shared else 0


class QueryGrowth(NamedTuple):
    """The query at position p is multiplied by 1 + ``beta`` * log(1 + floor(p / ``length``))."""

    beta: float
    length: int


CHUNK = 64
"""Tokens of a chunk of the gated delta rule. A prompt that is cut at multiples of it has the same bits as the whole."""


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers that keep a state of fixed size for each sequence, in place of keys and values.

    In gated DeltaNet, a causal convolution over queries, keys and values is followed by the gated delta rule. Other
    layers are a convolution alone, between two projections.

    Args:
        layers: the layers that are recurrent.
        kernel: tokens that an output of the convolution sees; the state keeps the last ``kernel`` - 1 inputs.
        key_heads: heads of queries and keys; ``key_dim``: their size.
        value_heads: heads of values, a multiple of ``key_heads``; ``value_dim``: their size.
        interleaved: True if the projections are stored as two matrices, interleaved by key head.
        width: channels of a convolution alone, whose state has no matrices; 0: the layers are gated DeltaNet.
    """

    layers: tuple[int, ...]
    kernel: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    interleaved: bool = False
    width: int = 0

    @property
    def key_width(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def units(self) -> int:
        """Number of parts that ranks can share: key heads, or channels."""
        return self.width or self.key_heads

    def channels(self, ranks: int = 1) -> int:
        """Returns the channels of the convolution on one of ``ranks`` devices."""
        return (self.width or 2 * self.key_width + self.value_width) // ranks

    def slot_bytes(self, itemsize: int, ranks: int = 1) -> int:
        """Returns the bytes of one sequence's state in one layer; ``itemsize``: of the engine's dtype.

        The matrices of the delta rule are float32, since errors of 16 bits would add up.
        """
        return (self.kernel - 1) * self.channels(ranks) * itemsize + 4 * self.key_dim * self.value_width // ranks

    def values(self, hidden: int, ranks: int = 1) -> int:
        """Returns the number of weights of one layer on one of ``ranks`` devices."""
        channels = self.channels(ranks)
        if self.width:
            return hidden * 4 * channels + channels * self.kernel
        heads, width = self.value_heads // ranks, self.value_width // ranks
        return hidden * (channels + 2 * width + 2 * heads) + channels * self.kernel + 2 * heads + self.value_dim


@dataclass(frozen=True)
class TextConfig:
    """The decoder. All layers are alike, except which of them have ``experts``, windows, cross-attention or a state.

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
        sinks: True if each head has a further score that counts in the softmax and has no value.
        causal: True if a token attends only to earlier ones; False: to its whole row, and prompts are not chunked.
        experts: None: every layer has one MLP.
        cross_attention_layers: layers that attend to image rows instead of tokens; they have no KV cache.
        spare: rows of the embedding table beyond the vocabulary, for ids that are never sampled.
        recurrent: layers with a state of fixed size, which have no KV cache; None: there are none.
        output_gate: True if the output of attention is multiplied by the sigmoid of a gate, stored after each query
            head in ``q_proj``.
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
    sinks: bool = False
    causal: bool = True
    experts: ExpertsConfig | None = None
    cross_attention_layers: tuple[int, ...] = ()
    spare: int = 0
    recurrent: RecurrentConfig | None = None
    output_gate: bool = False

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a state of fixed size."""
        return () if self.recurrent is None else self.recurrent.layers

    @property
    def cached_layers(self) -> int:
        """Number of layers with a KV cache."""
        return self.layers - len(self.cross_attention_layers) - len(self.recurrent_layers)

    @property
    def query_width(self) -> int:
        """Rows of ``q_proj`` for each query head: the query, and its gate if there is one."""
        return self.head_dim * (2 if self.output_gate else 1)

    @property
    def long_from(self) -> int:
        """Longest request, in tokens, that uses the short factors of LongRoPE; 0: there is one table."""
        return self.rope_scaling.original_max_position if isinstance(self.rope_scaling, LongScaling) else 0

    @property
    def dense_layers(self) -> int:
        """Number of layers with one MLP; the others have experts."""
        return self.layers if self.experts is None else len(self.experts.dense)

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
        others = {*self.text.cross_attention_layers, *self.text.recurrent_layers}
        return tuple(layer for layer in self.share.layers if layer not in others)

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
