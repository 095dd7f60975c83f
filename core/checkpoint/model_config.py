"""What a checkpoint's config.json describes, as frozen values that ``config_reader`` reads. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint.pooling_config import Pooling
from trencadis.core.checkpoint.quant_config import Quantisation
from trencadis.core.checkpoint.rope_config import LongScaling, Scaling
from trencadis.core.checkpoint.stage_share import StageShare
from trencadis.core.checkpoint.vision_config import VisionConfig
from trencadis.core.quant.kv_cache_format import KVFormat
from trencadis.core.shared_constants import RESERVED_ROWS

RMS, RMS_ONE, LAYER = "rms", "rms_one", "layer"
"""Norms: x / rms(x) * weight; the same times 1 + weight, in float32; (x - mean) / deviation * weight + bias."""

PRE, POST, SANDWICH = "pre", "post", "sandwich"
"""Where norms stand: before attention and MLP, behind the sums with what went in, or before and behind each of both."""

GATED, PLAIN = "gated", "plain"
"""MLPs: down(act(gate) * up); down(act(up))."""


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a decoder's layers: gated MLPs of which each token takes a few.

    Args:
        count: experts of a layer.
        top: experts of a token.
        inner: columns of an expert.
        normalise: whether the shares of a token's experts are divided by their sum.
        dense: layers that have an MLP of ``TextConfig.intermediate`` columns instead.
    """

    count: int
    top: int
    inner: int
    normalise: bool
    dense: tuple[int, ...] = ()

    def values(self, hidden: int, ranks: int = 1, only: int = 0) -> int:
        """Weights of one layer on one of ``ranks`` devices, with the router; ``only``: of so many experts."""
        return hidden * (self.count + 3 * (only or self.count) * -(-self.inner // ranks))


@dataclass(frozen=True)
class TextConfig:
    """The decoder, and the parts of its layers, which are alike but for ``experts``.

    Args:
        eps: of every norm.
        tied: whether the head is the embedding's table.
        mrope_section: frequencies of each of three axes of positions; None: there is one axis.
        interleaved: whether frequencies of the axes take turns, those of the first filling what is left.
        rotary: whether heads are rotated by their positions.
        rotary_dim: values of a head that are rotated; 0: all. Half of them lie at the start of each half of a head.
        scale: of the scores; 0: head_dim ** -0.5.
        table: width of the embedding and of the head, where it is not ``hidden``; two matrices lead in and out.
        learned: rows of a table of learned positions that are added to the embeddings; 0: none.
        position_offset: row of position 0 in it.
        types: rows of a table of token types that is added too, with a norm behind the sum; 0: neither. The type of a
            token is what its second position lies above its first.
        pad: the id that takes no position; -1: none.
        kv: how the KV cache holds keys and values; None: in the engine's type.
        residual_scale: of what attention and MLP add to the stream.
        logit_scale: of the logits.
        window: keys that a token sees, itself included; 0: all.
        full_layers: layers that see all keys in spite of ``window``.
        local_theta: rotary base of layers with a window, without scaling; 0: one table serves all layers.
        bidirectional_images: whether tokens of an image attend to each other, besides those before them.
        causal: whether a token sees those before it alone; else all of its row, whose prompt is then one chunk.
        experts: None: every layer has one MLP.
        cross_attention_layers: layers that attend to rows of images and not to tokens; they have no KV cache.
        spare: rows of the embedding's table behind the vocabulary, of ids that are never drawn.
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
    mlp: str = GATED
    activation: str = "silu"
    rotary: bool = True
    rotary_dim: int = 0
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
    causal: bool = True
    experts: ExpertsConfig | None = None
    cross_attention_layers: tuple[int, ...] = ()
    spare: int = 0

    @property
    def long_from(self) -> int:
        """Most tokens of a request that takes the short factors of its rotary table; 0: there is one table."""
        return self.rope_scaling.original_max_position if isinstance(self.rope_scaling, LongScaling) else 0

    @property
    def dense_layers(self) -> int:
        """Layers with one MLP; the others have experts."""
        return self.layers if self.experts is None else len(self.experts.dense)

    def window_of(self, layer: int) -> int:
        """Keys that a token sees in a layer; 0: all."""
        return 0 if layer in self.full_layers else self.window

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of all layers, each once."""
        return tuple(sorted({self.window_of(i) for i in range(self.layers)}))

    @property
    def upto(self) -> bool:
        """Whether a token may see keys behind its own place (``Attn.upto``)."""
        return not self.causal or self.bidirectional_images

    @property
    def width(self) -> int:
        """Columns of the embedding's table, of an image's tokens and of the rows that the head reads."""
        return self.table or self.hidden

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.scale or self.head_dim**-0.5


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs of a checkpoint.

    ``dtype``: of its 16- or 32-bit weights, ``quant``: of others; ``pooling`` None: it generates. ``unread``: keys of
    config.json that nothing here knows. ``template_token``: what a template puts for an image, where that is no
    ``image_token``. ``part``: what a pipeline stage holds; None: everything.
    ``encoder_data_parallel``: each rank has the whole tower, and images are dealt to ranks.
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
        """What is held here."""
        return self.part or StageShare(0, self.text.layers)

    @property
    def cached(self) -> tuple[int, ...]:
        """The layers here that have a KV cache."""
        return tuple(layer for layer in self.share.layers if layer not in self.text.cross_attention_layers)

    @property
    def encodes_images(self) -> bool:
        """Whether images are encoded here."""
        return self.vision is not None and self.share.starts

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return self.path.name

    @property
    def placeholder_token(self) -> int:
        """The id that stands for an image in a rendered template; -1: there is none."""
        return self.template_token if self.template_token >= 0 else self.image_token

    @property
    def row_parts(self) -> int:
        """Rows of the arena's tensor, each as wide as an embedding, that one row of the arena has."""
        return 1 if self.vision is None else 1 + self.vision.deepstack

    def alignment_unit(self, unit: int) -> int:
        """The unit of products' widths on a device that wants ``unit``; 1 where columns are quantised in groups, which
        zeros behind them would end."""
        return unit if self.quant is None or self.quant.widest_group() == 1 else 1


class SquareImage(NamedTuple):
    """A square image: its side in pixels, its patches and its slots."""

    side: int
    patches: int
    slots: int


def reserved_rows(config: ModelConfig) -> int:
    """Arena rows that no item gets: ZERO, SINK, and those that hold the same for every image."""
    return RESERVED_ROWS + (0 if config.vision is None else config.vision.constants)


@dataclass(frozen=True)
class ImageNeeds:
    """What images may need: slots and tokens of the largest, slots of the smallest; all 0 without a tower.

    ``images``: (slots of one, fewest, most at a time) of sizes that the user named; 0 images: as many as a prompt
    may hold. ``tile``: slots of every image, where all have as many; 0: they differ. ``squares``: the smallest square
    of each number of slots, by rising size.
    """

    slots: int = 0
    least_slots: int = 0
    tokens: int = 0
    images: tuple[tuple[int, int, int], ...] = ()
    tile: int = 0
    squares: tuple[SquareImage, ...] = ()
