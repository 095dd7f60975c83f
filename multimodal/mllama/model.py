"""A decoder with cross-attention to images, and its vision tower: two stacks over all tiles of an image at once.

Llama-3.2-Vision: Llama's decoder and a vision tower of two stacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.model_config import LAYER, ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend, Ops, VisionTensors
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.models.decoder import join_streams
from trencadis.core.models.image_cross_attention import CrossAttentionDecoder
from trencadis.core.models.linear_and_embedding import Linear, RowParallelLinear
from trencadis.core.models.mlp_and_norms import Norm, norm_of
from trencadis.core.step import Encode, Int32
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.mllama.config import MllamaVisionConfig, supported_aspect_ratios
from trencadis.multimodal.mllama.processor import read_normalisation_settings
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vit_block import ViTBlock, run_blocks, scale_and_shift

NORM_EPS = 1e-5
"""Epsilon of the norms before and after the first stack: torch's default, since no configuration has a key for it."""


class MllamaPatchEmbed:
    """Patch embedding of a VISION launch: patches, class tokens, and gated position and tile embeddings.

    A slot's kind, the second column of ``position``, is 0 for zeros; 1 + index: row ``index`` of the tile's position
    table alone; 1 + number of positions + index: that row plus the embedding of the slot's pixels.
    """

    position_table: Tensor  # [tiles of all arrangements x places, hidden]

    def __init__(
        self, ops: Ops, c: MllamaVisionConfig, patch: Linear, norm: Norm, scale_shift: tuple[Tensor, Tensor]
    ) -> None:
        self.ops, self.patch, self.norm, self.scale_shift, self.positions_per_tile = (
            ops,
            patch,
            norm,
            scale_shift,
            c.real_slots,
        )

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns (x, residual): x is [s, hidden] of ``dtype``, the residual like it, or None for zeros."""
        x, kind = self.patch(self.ops.patches(pixels, *self.scale_shift, dtype)), position[:, 1]
        filled = kind > self.positions_per_tile
        index = (kind - 1 - self.positions_per_tile * filled.int()).clamp(min=0)
        row = (position[:, 0] * self.positions_per_tile + index).long()
        x = x * filled.to(dtype)[:, None] + self.ops.gather_rows(self.position_table, row)
        x = self.norm(x)[0] * (kind > 0).to(dtype)[:, None]
        return x, self.ops.first_residual(x)


class MllamaPostTileEmbedding:
    """Norm and post-tile position embedding between the local and the global layers."""

    tile_table: Tensor  # [tiles of all arrangements, hidden]

    def __init__(self, ops: Ops, norm: Norm) -> None:
        self.ops, self.norm = ops, norm

    def __call__(self, x: Tensor, residual: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.norm(x, residual)[0] + self.ops.gather_rows(self.tile_table, position[:, 0].long())
        return x, self.ops.first_residual(x)


class MllamaVisionBlock(ViTBlock):
    """A vision transformer layer; in global layers the outputs of attention and MLP are multiplied by gates."""

    gates: Tensor | None = None  # [2]: of attention and of the MLP

    def __init__(self, backend: Backend, c: MllamaVisionConfig, gated: bool) -> None:
        super().__init__(backend, c, True, c.eps, c.activation)
        self.out = RowParallelLinear(backend.ops, backend.comm, c.hidden, c.hidden, unit=c.head_dim)
        self.gated = gated

    def load(self, source: WeightSource, name: str) -> None:
        self.norm1.load(source, f"{name}.input_layernorm")
        self.qkv.load(source, f"{name}.{self.qkv_prefix}")
        self.out.load(source, f"{name}.{self.config.attention_out}")
        self.norm2.load(source, f"{name}.post_attention_layernorm")
        self.mlp.load(source, f"{name}.mlp")
        if self.gated:
            self.gates = torch.cat([source.take(f"{name}.gate_{part}", (1,)).tanh() for part in ("attn", "ffn")])

    def finish_attention(self, out: Tensor) -> Tensor:
        return out if self.gates is None else out * self.gates[0]

    def finish_mlp(self, out: Tensor) -> Tensor:
        return out if self.gates is None else out * self.gates[1]

    def nbytes(self) -> int:
        return super().nbytes() + (0 if self.gates is None else self.gates.nbytes)


class MllamaModel(CrossAttentionDecoder):
    """``core.models.model_and_ops_api.VisionModel`` with Mllama's tower; ``normalisation``: of its processor."""

    def __init__(self, config: ModelConfig, backend: Backend, normalisation: PixelNormalisation) -> None:
        assert isinstance(config.vision, MllamaVisionConfig)
        c = self.tower = config.vision
        super().__init__(config, backend, c.cross_attention_rows)
        ops = backend.ops
        self.patch, self.projector = Linear(ops, backend.comm), Linear(ops, backend.comm)
        self.norms = [norm_of(LAYER, ops, c.hidden, NORM_EPS) for _ in range(2)]
        first = c.depth - c.global_layers
        self.blocks = [MllamaVisionBlock(backend, c, i >= first) for i in range(c.depth)]
        scale, shift = (t.to(backend.device) for t in scale_and_shift(normalisation, c.patch_embed_inputs // CHANNELS))
        self.patch_embed = MllamaPatchEmbed(ops, c, self.patch, self.norms[0], (scale, shift))
        self.post_tile_embedding = MllamaPostTileEmbedding(ops, self.norms[1])

    def load_from(self, source: WeightSource) -> None:
        super().load_from(source)
        c = self.tower
        stored = (c.hidden, CHANNELS, c.patch, c.patch)
        self.patch.pack(source.take("visual.patch_embedding.weight", stored).reshape(c.hidden, -1), None)
        for norm, name in zip(self.norms, ("pre", "post"), strict=True):
            norm.load(source, f"visual.layernorm_{name}")
        first = c.depth - c.global_layers
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}" if i < first else f"visual.gated.{i - first}")
        self.patch_embed.position_table, self.post_tile_embedding.tile_table = (
            self._load_position_table(source),
            self._load_tile_positions(source, "post"),
        )
        shape = (c.out_hidden, c.projector_inputs)
        weight, taken = source.take("visual.projector.weight", shape), len(c.intermediate_layers)
        last, between = weight[:, : c.hidden], weight[:, c.hidden :].view(c.out_hidden, c.hidden, taken)
        # The checkpoint's columns after those of the last output are [feature, output].
        weight = torch.cat([last, between.transpose(1, 2).reshape(c.out_hidden, -1)], dim=1)
        self.projector.pack(weight, source.take("visual.projector.bias", shape[:1]))

    def _load_tile_positions(self, source: WeightSource, which: str) -> Tensor:
        """Returns the gated tile embedding, [tiles of all arrangements, hidden].

        Row 0 of the stored table, no arrangement, is dropped.
        """
        c, at = self.tower, f"visual.{which}_tile_positional_embedding"
        count = len(supported_aspect_ratios(c.max_num_tiles))
        table = source.take(f"{at}.embedding.weight", (count + 1, c.max_num_tiles * c.hidden))
        return table[1:].reshape(-1, c.hidden) * source.take(f"{at}.gate", (1,)).tanh()

    def _load_position_table(self, source: WeightSource) -> Tensor:
        """Returns the sum of all embeddings by position, [tiles of all arrangements x positions, hidden], the class
        token first.
        """
        c, at = self.tower, "visual.gated_positional_embedding"
        count, places = len(supported_aspect_ratios(c.max_num_tiles)), c.real_slots
        gate = source.take(f"{at}.gate", (1,)).tanh().float()
        own = source.take(f"{at}.embedding", (places, c.hidden)).float() * (1 - gate)
        table = source.take(f"{at}.tile_embedding.weight", (count + 1, c.max_num_tiles * places * c.hidden))[1:].float()
        table = table.view(count * c.max_num_tiles, places, c.hidden) * gate + own
        table[:, 1:] += self._load_tile_positions(source, "pre").float()[:, None]
        table[:, 0] += source.take("visual.class_embedding", (c.hidden,)).float()
        return table.to(self.backend.dtype).view(-1, c.hidden)

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes their keys and values to ``arena[rows]``."""
        ops, c = self.ops, self.tower
        stream = [*ops.region(self.patch_embed, inputs.pixels, inputs.position, self.backend.dtype)]
        segments, local = ops.prepare_segments(inputs.segments), c.depth - c.global_layers
        intermediate: dict[int, Tensor] = {}

        def keep(number: int, x: Tensor, residual: Tensor) -> None:
            if number in c.intermediate_layers:
                intermediate[number] = ops.region(join_streams, x, residual)

        if local:
            stream = [*run_blocks(ops, self.blocks[:local], stream, None, segments, after=keep)]
        if c.global_layers:
            stream = [*ops.region(self.post_tile_embedding, *stream, inputs.position)]
            stream = [*run_blocks(ops, self.blocks[local:], stream, None, segments)]
        rows = (*stream, inputs.rows, *(intermediate[i] for i in c.intermediate_layers))
        ops.by_rows(self.store_rows, rows, self.persistent.arena)

    def store_rows(self, x: Tensor, residual: Tensor, rows: Tensor, *rest: Tensor) -> None:
        """Stores keys and values of slots [s, hidden], concatenated with the intermediate outputs in ``rest``, in
        ``arena[rows]``; the arena is the last of ``rest``.
        """
        *intermediate, arena = rest
        self.keep(self.projector(torch.cat([x + residual, *intermediate], dim=1)), rows, arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images one after the other, each from a multiple of its slots on; the remaining slots are padding."""
        c = self.tower
        windows = slots // WINDOW_SLOTS
        packed = VisionInputs(
            pixels=np.zeros((slots, c.slot.values), np.uint8),
            position=np.zeros((slots, 2), np.int32),
            segment=np.arange(windows, dtype=np.int32),
            count=np.full(windows, WINDOW_SLOTS, np.int32),
            rows=np.full(slots, SINK_ROW, np.int32),
            padding_window=np.zeros(windows, np.int32),
        )
        for i, image in enumerate(images):
            self._pack_image(packed, image, i * c.slots_per_tile)
        return packed

    def _pack_image(self, packed: VisionInputs, image: Encode, at: int) -> None:
        """Packs one image: its real slots from slot ``at`` on, its padding tiles from the next window on."""
        c, side, each = self.tower, self.tower.side, self.tower.real_slots
        high, wide = image.grid[1] // side, image.grid[2] // side
        tiles = high * wide
        first = supported_aspect_ratios(c.max_num_tiles).index((high, wide)) * c.max_num_tiles
        real, padding_start = tiles * each, at + align_up(tiles * each, WINDOW_SLOTS)
        padding = c.max_num_tiles * (each + c.padding_slots) - real
        index = np.arange(each, dtype=np.int32)
        kinds = np.where(index > 0, 1 + each + index, 1)
        packed.position[at : at + real] = tile_slot_positions(first, tiles, kinds)
        patches = at + np.flatnonzero(np.tile(index > 0, tiles))
        packed.pixels[patches] = image.pixels
        packed.rows[at : at + real] = image.rows[:real]
        empty = (c.max_num_tiles - tiles) * each
        packed.position[padding_start : padding_start + empty] = tile_slot_positions(
            first + tiles, c.max_num_tiles - tiles, 1 + index
        )
        packed.rows[padding_start : padding_start + empty] = image.rows[real:]
        fill = slice(padding_start + empty, padding_start + padding)
        packed.position[fill] = tile_slot_positions(first, c.max_num_tiles, np.zeros(c.padding_slots, np.int32))
        for start, count, padding_flag in ((at, real, 0), (padding_start, padding, 1)):
            here = slice(start // WINDOW_SLOTS, (start + align_up(count, WINDOW_SLOTS)) // WINDOW_SLOTS)
            packed.segment[here], packed.padding_window[here] = at // WINDOW_SLOTS, padding_flag  # type: ignore[index]
            packed.count[here.stop - 1] = count - (here.stop - here.start - 1) * WINDOW_SLOTS

    def nbytes(self) -> int:
        own = (
            self.patch.bytes
            + self.projector.bytes
            + self.patch_embed.position_table.nbytes
            + self.post_tile_embedding.tile_table.nbytes
        )
        return super().nbytes() + own + sum(part.nbytes() for part in (*self.norms, *self.blocks))


def tile_slot_positions(first: int, tiles: int, kinds: Int32) -> Int32:
    """Returns int32 [tiles x len(kinds), 2]: the table row of each tile from ``first`` on, and the kinds of its
    slots.
    """
    row = np.repeat(np.arange(first, first + tiles, dtype=np.int32), len(kinds))
    return np.stack([row, np.tile(kinds, tiles)], axis=1).astype(np.int32)


def make(config: ModelConfig, backend: Backend) -> MllamaModel:
    """Builds the model; named in the family's record."""
    return MllamaModel(config, backend, read_normalisation_settings(config))
