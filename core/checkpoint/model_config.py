"""What a checkpoint's config.json describes, as frozen values (``core.checkpoint.reading`` reads it). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trencadis.core.checkpoint.pooling import Pooling
from trencadis.core.checkpoint.quant_config import Quantisation
from trencadis.core.checkpoint.rope_config import Scaling
from trencadis.core.layout import CHANNELS, FACTOR, MERGE, PATCH, TEMPORAL
from trencadis.core.quant.kv import KVForm

RMS, LAYER = "rms", "layer"
"""Norms: x / rms(x) * weight; (x - mean) / deviation * weight + bias."""

PRE, POST = "pre", "post"
"""Where norms stand: before attention and MLP, or behind the sums with what went in."""

GATED, PLAIN = "gated", "plain"
"""MLPs: down(act(gate) * up); down(act(up))."""


@dataclass(frozen=True)
class TextConfig:
    """The decoder, and the parts of its layers, which are all alike.

    Args:
        eps: of every norm.
        tied: whether the head is the embedding's table.
        rotary: whether heads turn by their positions.
        scale: of the scores; 0: head_dim ** -0.5.
        table: width of the embedding and of the head, where it is not ``hidden``; two matrices lead in and out.
        learned: rows of a table of learned positions that are added to the embeddings; 0: none.
        position_offset: row of position 0 in it.
        kv: how the KV cache holds keys and values; None: in the engine's type.
        residual_scale: of what attention and MLP add to the stream.
        logit_scale: of the logits.
        window: keys that a token sees, itself included; 0: all. Reading refuses windows that a request can exceed.
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
    rope_scaling: Scaling | None = None
    out_bias: bool = False
    mlp_bias: bool = False
    kv: KVForm | None = None
    norm: str = RMS
    place: str = PRE
    final_norm: bool = True
    qk_norm: bool = False
    mlp: str = GATED
    activation: str = "silu"
    rotary: bool = True
    scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    table: int = 0
    learned: int = 0
    position_offset: int = 0
    window: int = 0

    @property
    def width(self) -> int:
        """Columns of the embedding's table, of an image's tokens and of the rows that the head reads."""
        return self.table or self.hidden

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.scale or self.head_dim**-0.5


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int
    full_layers: tuple[int, ...]
    patch: int = PATCH
    merge: int = MERGE
    temporal: int = TEMPORAL
    channels: int = CHANNELS
    tokens_per_second: float = 2.0
    rope_theta: float = 10000.0

    @property
    def patch_values(self) -> int:
        """Values of one patch: channels x temporal x patch x patch."""
        return self.channels * self.temporal * self.patch * self.patch


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs of a checkpoint.

    ``dtype``: of its 16- or 32-bit weights, ``quant``: of others; ``pooling`` None: it generates. ``unread``: keys of
    config.json that nothing here knows.
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

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        return self.path.name

    def aligned(self, unit: int) -> int:
        """The unit of products' widths on a device that wants ``unit``; 1 where columns are quantised in groups, which
        zeros behind them would end."""
        return unit if self.quant is None or self.quant.widest_group() == 1 else 1


@dataclass(frozen=True)
class ImageNeeds:
    """What images may need: slots and tokens of the largest, slots of the smallest; all 0 without a tower.

    ``step``: sides are multiples of this many pixels. ``pictures``: (slots of one, fewest, most at a time) of sizes
    that the user named; 0 pictures: as many as a prompt may hold.
    """

    slots: int = 0
    least_slots: int = 0
    tokens: int = 0
    step: int = FACTOR
    pictures: tuple[tuple[int, int, int], ...] = ()
