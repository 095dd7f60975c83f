"""Gemma-4 with images: its decoder, and its tower over packed slots or the 12B model's embedding of large patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import LAYER, RMS, ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend, Rotary, Segments, VisionTensors
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.models.decoder_with_vision_tower import TowerDecoder
from trencadis.core.models.linear_and_embedding import Linear
from trencadis.core.models.mlp_and_norms import RMSNorm, norm_of
from trencadis.core.models.rotary_embedding import HeadSpan, PartialRotarySource, inverse_frequencies
from trencadis.core.step import Encode
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.gemma4.config import MERGE, Gemma4VisionConfig, PatchEmbedConfig
from trencadis.multimodal.gemma4.processor import PIXELS, UNIT_PIXELS
from trencadis.multimodal.patch_packing import pack_whole_images, patch_coordinates
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vit_block import TowerInputs, ViTBlock, run_blocks, scale_and_shift

CELL = MERGE**2
FULL_CELLS = WINDOW_SLOTS // CELL
"""Cells of a window, which has one slot of padding behind them."""

EPS = 1e-5
"""Epsilon of the layer norms of ``LargePatchEmbed``: torch's default, since no configuration has a key for it."""


class AxialRotarySource(PartialRotarySource):
    """Wraps a source of heads whose first half is rotated by the column and whose second half by the row.

    Rotary ops rotate the first half of a head against the second, so each takes one part of both.
    """

    def __init__(self, source: WeightSource, head_dim: int) -> None:
        super().__init__(source, head_dim, head_dim)
        quarter = head_dim // 4
        self.spans = tuple(HeadSpan(i * quarter, (i + 1) * quarter) for i in (0, 2, 1, 3))


class Gemma4Block(ViTBlock):
    """A layer of the tower: norms around attention and MLP, norms of queries, keys and values, scores unscaled."""

    def __init__(self, backend: Backend, c: Gemma4VisionConfig) -> None:
        super().__init__(backend, c, True, c.eps, c.activation)
        self.out_norms = [norm_of(RMS, self.ops, c.hidden, c.eps) for _ in range(2)]
        self.v_norm = RMSNorm(self.ops, c.head_dim, c.eps)
        self.v_norm.weight = torch.ones(c.head_dim, dtype=backend.dtype, device=backend.device)

    def load(self, source: WeightSource, name: str) -> None:
        rotated = AxialRotarySource(source, self.head_dim)
        self.norm1.load(source, f"{name}.input_layernorm")
        self.qkv.load(rotated, f"{name}.self_attn")
        self.out.load(source, f"{name}.self_attn.o_proj")
        self.norm2.load(source, f"{name}.post_attention_layernorm")
        for norm, part in zip(self.head_norms or (), ("q_norm", "k_norm"), strict=False):
            norm.load(rotated, f"{name}.self_attn.{part}")
        for norm_out, part in zip(self.out_norms, ("attention", "mlp"), strict=True):
            norm_out.load(source, f"{name}.{part}_out_layernorm")
        self.mlp.load(source, f"{name}.mlp")

    def finish_attention(self, out: Tensor) -> Tensor:
        return self.out_norms[0](out)[0]

    def finish_mlp(self, out: Tensor) -> Tensor:
        return self.out_norms[1](out)[0]

    def _attend(self, x: Tensor, rotary: Rotary | None, segments: Segments, rows: AdapterRows | None = None) -> Tensor:
        s, d = x.shape[0], self.head_dim
        q, k, v = (t.view(s, -1, d) for t in torch.split(self.qkv(x, rows), self.width, dim=1))
        assert self.head_norms is not None and rotary is not None
        q, k, v = self.head_norms[0].heads(q), self.head_norms[1].heads(k), self.v_norm.heads(v)
        q, k = self.ops.rope_vision(q, k, rotary)
        return self.attend(q, k, v, segments, 1.0).reshape(s, -1)

    def nbytes(self) -> int:
        return super().nbytes() + sum(norm.nbytes() for norm in (*self.out_norms, self.v_norm))


class PatchEmbed:
    """Patch embedding of a VISION launch: patches plus two learned positions, and their rotary factors."""

    def __init__(self, backend: Backend, c: Gemma4VisionConfig) -> None:
        self.ops, self.config, self.patch = backend.ops, c, Linear(backend.ops, backend.comm)
        self.scale_shift = tuple(t.to(backend.device) for t in scale_and_shift(PIXELS, c.slot.values // CHANNELS))
        self.inv_freq = inverse_frequencies(c.head_dim // 2, c.theta).repeat(2).to(backend.device)
        self.axis = (1 - torch.arange(2)).repeat_interleave(c.head_dim // 4).to(backend.device)
        self.columns: Tensor
        self.rows: Tensor  # [positions, hidden] each

    def load(self, source: WeightSource) -> None:
        c = self.config
        weight = source.take("visual.patch_embedder.input_proj.weight", (c.hidden, c.slot.values))
        # The checkpoint's columns are [row, column, channel]; a slot's values are [channel, row, column].
        weight = weight.view(c.hidden, c.patch, c.patch, CHANNELS).permute(0, 3, 1, 2).reshape(c.hidden, -1)
        self.patch.pack(weight.contiguous(), None)
        shape = (2, c.positions, c.hidden)
        self.columns, self.rows = source.take("visual.patch_embedder.position_embedding_table", shape).unbind(0)

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> TowerInputs:
        """Returns the inputs of the first layer, of ``dtype``; ``position``: row and column, int32 [s, 2]."""
        ops, (scale, shift) = self.ops, self.scale_shift
        x = self.patch(ops.patches(pixels, scale, shift, dtype))
        places = ops.gather_rows(self.columns, position[:, 1].long()) + ops.gather_rows(
            self.rows, position[:, 0].long()
        )
        x = x + places
        return TowerInputs(x, ops.first_residual(x), ops.rotary(position.t(), self.inv_freq, self.axis))

    def nbytes(self) -> int:
        return self.patch.bytes + self.columns.nbytes + self.rows.nbytes


class MeanProjector:
    """The end of a VISION launch: the mean of each cell, a norm without a weight, and the projector."""

    def __init__(self, backend: Backend, c: Gemma4VisionConfig) -> None:
        self.ops, self.config = backend.ops, c
        self.norm = RMSNorm(self.ops, c.hidden, c.eps)
        self.norm.weight = torch.ones(c.hidden, dtype=backend.dtype, device=backend.device)
        self.projection = Linear(self.ops, backend.comm)
        self.bias_scale: tuple[Tensor, Tensor] | None = None  # [hidden] each

    def load(self, source: WeightSource) -> None:
        c = self.config
        if c.standardise:
            bias, scale = (source.take(f"visual.std_{name}", (c.hidden,)) for name in ("bias", "scale"))
            self.bias_scale = bias, scale
        self.projection.pack(source.take("visual.embedding_projection.weight", (c.out_hidden, c.hidden)), None)

    def __call__(self, x: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores the projected means in ``arena[rows]``; x is [cells, slots of a cell, hidden]."""
        mean = x.float().mean(1).to(x.dtype).float() * self.config.hidden**0.5
        if self.bias_scale is not None:
            mean = (mean - self.bias_scale[0].float()) * self.bias_scale[1].float()
        self.ops.scatter_rows(arena, rows, self.projection(self.norm(mean.to(x.dtype))[0]))

    def nbytes(self) -> int:
        vectors = sum(t.nbytes for t in self.bias_scale or ())
        return self.norm.nbytes() + self.projection.bytes + vectors


class CellGather:
    """Takes the slots of all cells from the windows that they are packed in."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Returns the sum of x and residual [s, hidden] as [cells, slots of a cell, hidden]."""
        windows = (x + residual).view(-1, WINDOW_SLOTS, x.shape[-1])
        return windows[:, : FULL_CELLS * CELL].reshape(-1, CELL, x.shape[-1]).contiguous()


class LargePatchEmbed:
    """A whole VISION launch of the 12B model: a row for each patch of 48 pixels."""

    def __init__(self, backend: Backend, c: PatchEmbedConfig) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.config = ops, c
        self.scale_shift = tuple(t.to(backend.device) for t in scale_and_shift(UNIT_PIXELS, c.slot.values // CHANNELS))
        self.first, self.second, self.third = (
            norm_of(LAYER, ops, width, EPS) for width in (c.slot.values, c.hidden, c.hidden)
        )
        self.patch, self.projection = Linear(ops, comm), Linear(ops, comm)
        self.norm = RMSNorm(ops, c.hidden, c.eps)
        self.norm.weight = torch.ones(c.hidden, dtype=backend.dtype, device=backend.device)
        self.positions: Tensor  # [2 x positions, hidden]: those of columns, and of rows, alternate

    def load(self, source: WeightSource) -> None:
        c, values = self.config, self.config.slot.values
        order = torch.arange(values).view(c.patch, c.patch, CHANNELS).permute(2, 0, 1).flatten()
        self.first.load(source, "visual.patch_ln1")
        # The checkpoint's values are [row, column, channel]; a slot's are [channel, row, column].
        for name in ("weight", "bias"):
            stored: Tensor = getattr(self.first, name)
            setattr(self.first, name, stored.index_select(0, order.to(stored.device)))
        weight = source.take("visual.patch_dense.weight", (c.hidden, values))
        bias = source.take("visual.patch_dense.bias", (c.hidden,))
        self.patch.pack(weight.index_select(1, order.to(weight.device)), bias)
        self.second.load(source, "visual.patch_ln2")
        self.third.load(source, "visual.pos_norm")
        self.positions = source.take("visual.pos_embedding", (c.positions, 2, c.hidden)).view(-1, c.hidden)
        self.projection.pack(source.take("visual.embedding_projection.weight", (c.out_hidden, c.hidden)), None)

    def __call__(self, pixels: Tensor, position: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores the rows of patches in ``arena[rows]``; ``position``: row and column, int32 [s, 2]."""
        ops, (scale, shift) = self.ops, self.scale_shift
        x = self.first(ops.patches(pixels, scale, shift, arena.dtype))[0]
        x = self.second(self.patch(x))[0]
        at = 2 * position.long()
        x = x + (ops.gather_rows(self.positions, at[:, 1]) + ops.gather_rows(self.positions, at[:, 0] + 1))
        ops.scatter_rows(arena, rows, self.projection(self.norm(self.third(x)[0])[0]))

    def nbytes(self) -> int:
        norms = sum(norm.nbytes() for norm in (self.first, self.second, self.third, self.norm))
        return norms + self.patch.bytes + self.projection.bytes + self.positions.nbytes


class Gemma4Tower:
    """Encodes packed slots and stores rows of cells in the arena."""

    def __init__(self, backend: Backend, c: Gemma4VisionConfig) -> None:
        self.ops, self.config, self.dtype = backend.ops, c, backend.dtype
        self.patch_embed, self.gather = PatchEmbed(backend, c), CellGather()
        self.blocks = [Gemma4Block(backend, c) for _ in range(c.depth)]
        self.projector = MeanProjector(backend, c)

    def load(self, source: WeightSource) -> None:
        self.patch_embed.load(source)
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        self.projector.load(source)

    def __call__(self, inputs: VisionTensors, arena: Tensor) -> None:
        ops = self.ops
        *stream, rotary = ops.region(self.patch_embed, inputs.pixels, inputs.position, self.dtype)
        segments = ops.prepare_segments(inputs.segments)
        x, residual = run_blocks(ops, self.blocks, stream, rotary, segments)
        cells = ops.region(self.gather, x, residual)
        ops.by_rows(self.projector, (cells, inputs.rows), arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs the cells of images in windows of seven, each image from a window's start on."""
        c, windows = self.config, slots // WINDOW_SLOTS
        packed = VisionInputs(
            pixels=np.zeros((slots, c.slot.values), np.uint8),
            position=np.zeros((slots, 2), np.int32),
            segment=np.zeros(windows, np.int32),
            count=np.full(windows, WINDOW_SLOTS, np.int32),
            rows=np.full(windows * FULL_CELLS, SINK_ROW, np.int32),
        )
        at = 0
        for number, image in enumerate(images):
            _, h, w = image.grid
            cells = np.arange(h * w // CELL)
            window, place = np.divmod(cells, FULL_CELLS)
            first = (at + window) * WINDOW_SLOTS + place * CELL
            here = (first[:, None] + np.arange(CELL)).reshape(-1)
            packed.pixels[here], packed.position[here] = image.pixels, patch_coordinates(h, w, MERGE)
            packed.rows[at * FULL_CELLS : at * FULL_CELLS + len(cells)] = image.rows
            used = int(window[-1]) + 1
            packed.segment[at : at + used] = number
            packed.count[at : at + used] = FULL_CELLS * CELL
            packed.count[at + used - 1] = (int(place[-1]) + 1) * CELL
            at += used
        packed.segment[at:] = len(images) + np.arange(windows - at, dtype=np.int32)
        return packed

    def nbytes(self) -> int:
        return self.patch_embed.nbytes() + self.projector.nbytes() + sum(block.nbytes() for block in self.blocks)


class PatchTower:
    """The 12B model's whole tower: the patch embedding alone, which is run over rows."""

    def __init__(self, backend: Backend, c: PatchEmbedConfig) -> None:
        self.ops, self.config, self.patch_embed = backend.ops, c, LargePatchEmbed(backend, c)

    def load(self, source: WeightSource) -> None:
        self.patch_embed.load(source)

    def __call__(self, inputs: VisionTensors, arena: Tensor) -> None:
        self.ops.by_rows(self.patch_embed, (inputs.pixels, inputs.position, inputs.rows), arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images one after the other, each from a window's start on."""
        return pack_whole_images(images, slots, self.config.slot.values, 1)

    def nbytes(self) -> int:
        return self.patch_embed.nbytes()


class Gemma4Model(TowerDecoder):
    """``VisionModel`` of Gemma-4."""

    tower: Gemma4Tower | PatchTower

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        c = config.vision
        assert isinstance(c, Gemma4VisionConfig)
        if self.share.starts:
            shared = self.tower_backend
            self.tower = PatchTower(shared, c) if isinstance(c, PatchEmbedConfig) else Gemma4Tower(shared, c)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        return self.tower.pack(images, slots)


def make(config: ModelConfig, backend: Backend) -> Gemma4Model:
    """Builds the model; named in the records of both families."""
    return Gemma4Model(config, backend)
