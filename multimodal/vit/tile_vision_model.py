"""A model whose images are tiles: the tower on packed slots, cell by cell, and the projector that stores its rows
in the arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.checkpoint.model_config import LAYER, ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend, Ops, VisionTensors
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.media_spans import RESERVED_ROWS, SINK_ROW
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.linear_and_embedding import (
    ColumnParallelLinear,
    ColumnPart,
    Linear,
    RowParallelLinear,
    TowerLayer,
    replicate_layers,
)
from trencadis.core.models.mlp_and_norms import Norm, norm_of
from trencadis.core.models.model_and_ops_api import Persistent
from trencadis.core.step import Encode
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.pixel_normalisation_and_fixed_point import OFFSET, PLANE_WEIGHTS, PLANES, PixelNormalisation
from trencadis.multimodal.vit.tile_vision_config import CHANNELS, TileVisionConfig
from trencadis.multimodal.vit.vit_block import ViTBlock, run_blocks, scale_and_shift

CELL_EPS = 1e-5
"""Epsilon of the norm over a whole cell: torch's default, since no configuration has a key for it."""


class TilePatchEmbed:
    """Patch embedding of a VISION launch: patches and class tokens plus position embeddings."""

    position_table: Tensor  # [1 + patches, hidden]; row 0 is the class token at its position

    def __init__(self, ops: Ops, patch: Linear, norm: Norm | None, scale_shift: tuple[Tensor, Tensor]) -> None:
        self.ops, self.patch, self.norm, self.scale_shift = ops, patch, norm, scale_shift

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns (x, residual): x is [s, hidden] of ``dtype``, the residual like it, or None for zeros.

        ``position`` is int32 [s, 2]: the row of the position table, and 0.
        """
        x, index = self.patch(self.normalise_pixels(pixels, dtype)), position[:, 0]
        x = x * (index != 0).to(dtype)[:, None] + self.ops.gather_rows(self.position_table, index.long())
        if self.norm is not None:
            x = self.norm(x)[0]
        return x, self.ops.first_residual(x)

    def normalise_pixels(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns pixel values of slots' bytes, [s, values of a patch] of ``dtype``."""
        return self.ops.patches(pixels, *self.scale_shift, dtype)


class FixedPointPatchEmbed(TilePatchEmbed):
    """Patch embedding of a VISION launch whose values have three bytes each (``bytes_per_value``).

    ``scale_shift``: (scale, shift), float32 [values of a patch].
    """

    def __init__(self, ops: Ops, patch: Linear, norm: Norm | None, scale_shift: tuple[Tensor, Tensor]) -> None:
        scale, shift = scale_shift
        shifts = [shift - OFFSET * scale, torch.zeros_like(shift), torch.zeros_like(shift)]
        super().__init__(ops, patch, norm, (torch.cat([scale * step for step in PLANE_WEIGHTS]), torch.cat(shifts)))

    def normalise_pixels(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        planes = self.ops.patches(pixels, *self.scale_shift, torch.float32).view(len(pixels), PLANES, -1)
        return (planes[:, 0] + planes[:, 1] + planes[:, 2]).to(dtype)


class LayerScaleBlock(ViTBlock):
    """A vision transformer layer with layer scale on the outputs of attention and MLP."""

    def load(self, source: WeightSource, name: str) -> None:
        super().load(source, name)
        width = (self.config.hidden,)
        self.attention_scale, self.mlp_scale = (source.take(f"{name}.lambda_{i}", width) for i in (1, 2))

    def finish_attention(self, out: Tensor) -> Tensor:
        return out * self.attention_scale

    def finish_mlp(self, out: Tensor) -> Tensor:
        return out * self.mlp_scale

    def nbytes(self) -> int:
        return super().nbytes() + self.attention_scale.nbytes + self.mlp_scale.nbytes


class TileProjector:
    """Projector of a VISION launch: norms, the projector's linear layers, and the store of its rows in the arena."""

    def __init__(self, backend: Backend, c: TileVisionConfig) -> None:
        ops, comm, width = backend.ops, backend.comm, c.cell_width
        self.ops, self.hidden, self.act = ops, c.hidden, c.projector
        self.norm = norm_of(LAYER, ops, c.hidden, c.eps) if c.last_norm else None
        self.cell_norm = norm_of(LAYER, ops, width, CELL_EPS) if c.cell_norm else None
        self.bias = c.projector_bias
        self.linear_1: Linear = Linear(ops, comm)
        self.linear_2: RowParallelLinear | None = None
        if c.projector:
            part = (ColumnPart("linear_1", c.out_hidden, 1),)
            self.linear_1 = ColumnParallelLinear(ops, comm, width, part, bias=c.projector_bias)
            self.linear_2 = RowParallelLinear(ops, comm, c.out_hidden, c.out_hidden, bias=c.projector_bias)
        self.shape = c.out_hidden, width

    def load(self, source: WeightSource) -> None:
        at = "visual.projector"
        if self.norm is not None:
            self.norm.load(source, "visual.last_norm")
        if self.cell_norm is not None:
            self.cell_norm.load(source, f"{at}.cell_norm")
        if self.linear_2 is not None and isinstance(self.linear_1, ColumnParallelLinear):
            self.linear_1.load(source, at)
            self.linear_2.load(source, f"{at}.linear_2")
            return
        bias = source.take(f"{at}.linear_1.bias", self.shape[:1]) if self.bias else None
        found = source.take_quantised(f"{at}.linear_1", self.shape, 0, 0, self.shape[0])
        self.linear_1.pack(source.take(f"{at}.linear_1.weight", self.shape) if found is None else found, bias)

    def list_layers(self) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters."""
        at, (outputs, inputs) = "visual.projector", self.shape
        if self.linear_2 is None:
            yield TowerLayer(f"{at}.linear_1", self.linear_1, inputs, outputs)
            return
        yield TowerLayer(at, self.linear_1)
        yield TowerLayer(f"{at}.linear_2", self.linear_2)

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, adapters: AdapterRows | None, arena: Tensor) -> None:
        """Stores tokens in ``arena[rows]``; x and residual are [cells, values of a cell].

        ``adapters``: those of the cells.
        """
        shape = x.shape
        if self.norm is not None:
            x = self.norm(x.reshape(-1, self.hidden), residual.reshape(-1, self.hidden))[0].view(shape)
        else:
            x = x + residual
        if self.cell_norm is not None:
            x = self.cell_norm(x)[0]
        x = self.linear_1(x, adapters)
        if self.linear_2 is not None:
            x = self.linear_2(self.ops.act(x, self.act), adapters)
        self.ops.scatter_rows(arena, rows, x)

    def nbytes(self) -> int:
        norms = sum(n.nbytes() for n in (self.norm, self.cell_norm) if n is not None)
        return norms + self.linear_1.bytes + (0 if self.linear_2 is None else self.linear_2.bytes)


class TileVisionModel(Decoder):
    """``core.models.model_and_ops_api.VisionModel`` over tiles, which the first pipeline stage encodes.

    ``normalisation``: of the checkpoint's processor.
    """

    constants: Tensor | None = None

    def __init__(self, config: ModelConfig, backend: Backend, normalisation: PixelNormalisation) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, TileVisionConfig)
        if not self.share.starts:
            return
        tower = replicate_layers(backend) if config.encoder_data_parallel else backend
        c, ops, comm = config.vision, backend.ops, tower.comm
        self.tower, self.patch = c, Linear(ops, comm)
        self.first_norm = norm_of(LAYER, ops, c.hidden, c.eps) if c.first_norm else None
        kind = LayerScaleBlock if c.layer_scale else ViTBlock
        self.blocks = [kind(tower, c, True, c.eps, c.activation) for _ in range(c.depth)]
        scale, shift = scale_and_shift(normalisation, c.patch_embed_inputs // CHANNELS)
        entry = TilePatchEmbed if c.bytes_per_value == 1 else FixedPointPatchEmbed
        self.patch_embed = entry(ops, self.patch, self.first_norm, (scale.to(backend.device), shift.to(backend.device)))
        self.projector = TileProjector(tower, c)

    def load_from(self, source: WeightSource) -> None:
        super().load_from(source)
        if not self.share.starts:
            return
        c, at = self.tower, "visual.embeddings"
        stored = (c.hidden, CHANNELS, c.patch, c.patch)
        self.patch.pack(source.take(f"{at}.patch_embedding.weight", stored).reshape(c.hidden, -1), None)
        self.patch_embed.position_table = self.load_position_table(source, at)
        if self.first_norm is not None:
            self.first_norm.load(source, "visual.first_norm")
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        self.projector.load(source)
        if c.constants:
            self.constants = self.load_constant_rows(source)

    def load_position_table(self, source: WeightSource, at: str) -> Tensor:
        """Returns the position table, [1 + patches, hidden]: the class token at its position, then the embedding of
        each patch position, biases included.

        This is SigLIP's, which has no class token: row 0 is zeros.
        """
        c = self.tower
        table = source.take(f"{at}.position_embedding.weight", (c.side**2, c.hidden))
        table = table + source.take(f"{at}.patch_embedding.bias", (c.hidden,))
        return torch.cat([torch.zeros_like(table[:1]), table])

    def load_constant_rows(self, source: WeightSource) -> Tensor:
        """Returns the rows that are the same for every image, [constants, width of an arena row].

        Only towers with ``constants`` implement it.
        """
        raise NotImplementedError

    def project_cells(self, source: WeightSource, cells: Tensor) -> Tensor:
        """Applies the projector to the values of cells [n, cell_width]; returns [n, out_hidden], computed in
        float32.
        """
        c, at, rows = self.tower, "visual.projector", cells.float()
        assert c.projector == "gelu"
        for name, shape in (("linear_1", (c.out_hidden, c.cell_width)), ("linear_2", (c.out_hidden, c.out_hidden))):
            if name == "linear_2":
                rows = functional.gelu(rows)
            packed = source.take_quantised(f"{at}.{name}", shape, 0, 0, shape[0])
            weight = source.take(f"{at}.{name}.weight", shape) if packed is None else packed.dequantised()
            rows = functional.linear(rows, weight.float(), source.take(f"{at}.{name}.bias", shape[:1]).float())
        return rows.to(self.backend.dtype)

    def bind(self, persistent: Persistent) -> None:
        super().bind(persistent)
        if self.constants is not None:
            persistent.arena[RESERVED_ROWS : RESERVED_ROWS + len(self.constants)] = self.constants

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed tiles and writes their tokens to ``arena[rows]``."""
        ops, c = self.ops, self.tower
        rows = inputs.rows[: len(inputs.pixels) // c.slots_per_tile * c.rows_per_tile]
        adapters = self.prepare_image_adapters(
            inputs if inputs.cell_adapter is None else inputs._replace(cell_adapter=inputs.cell_adapter[: len(rows)])
        )
        stream = [*ops.region(self.patch_embed, inputs.pixels, inputs.position, self.backend.dtype)]
        segments = ops.prepare_segments(inputs.segments)
        x, residual = run_blocks(ops, self.blocks, stream, None, segments, adapters)
        count = len(x) // c.slots_per_tile

        def cells(t: Tensor) -> Tensor:
            tiles = t[: count * c.slots_per_tile].view(count, c.slots_per_tile, c.hidden)[:, : c.side**2]
            return tiles.reshape(count * c.rows_per_tile, c.cell_width)

        x, residual = cells(x), cells(residual)
        ops.by_rows(self.projector, (x, residual, rows, adapters.cells), self.persistent.arena)

    def list_tower_layers(self) -> Iterator[TowerLayer]:
        if not self.share.starts:
            return
        for i, block in enumerate(self.blocks):
            yield from block.list_layers(f"visual.blocks.{i}")
        yield from self.projector.list_layers()

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs tiles one after the other; the rest of ``slots`` is padding.

        Tile i has rows from i x ``rows_per_tile`` on.
        """
        c, patches = self.tower, self.tower.side**2
        packed = VisionInputs(
            pixels=np.zeros((slots, c.slot.values), np.uint8),
            position=np.zeros((slots, 2), np.int32),
            segment=np.arange(slots // WINDOW_SLOTS, dtype=np.int32),
            count=np.full(slots // WINDOW_SLOTS, WINDOW_SLOTS, np.int32),
            rows=np.full(slots // c.slot.cell, SINK_ROW, np.int32),
        )
        for i, image in enumerate(images):
            here = slice(i * c.slots_per_tile, i * c.slots_per_tile + patches)
            packed.pixels[here] = image.pixels
            packed.position[here, 0] = 1 + c.patch_positions
            packed.rows[i * c.rows_per_tile : (i + 1) * c.rows_per_tile] = image.rows
            windows = slice(i * c.slots_per_tile // WINDOW_SLOTS, (i + 1) * c.slots_per_tile // WINDOW_SLOTS)
            packed.segment[windows] = windows.start
            packed.count[windows.stop - 1] = c.real_slots - (c.slots_per_tile - WINDOW_SLOTS)
        return packed

    def nbytes(self) -> int:
        if not self.share.starts:
            return super().nbytes()
        own = self.patch.bytes + self.patch_embed.position_table.nbytes + self.projector.nbytes()
        own += 0 if self.first_norm is None else self.first_norm.nbytes()
        own += 0 if self.constants is None else self.constants.nbytes
        return super().nbytes() + own + sum(block.nbytes() for block in self.blocks)
