"""LFM2-VL: LFM2's decoder, and SigLIP2's tower on packed images whose positions are a resized table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import LAYER, ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend, Ops, VisionTensors
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.models.decoder_with_vision_tower import TowerDecoder
from trencadis.core.models.linear_and_embedding import ColumnParallelLinear, ColumnPart, Linear, RowParallelLinear
from trencadis.core.models.mlp_and_norms import norm_of
from trencadis.core.step import Encode
from trencadis.multimodal.lfm2_vl.config import Lfm2VisionConfig, add_resized_positions
from trencadis.multimodal.lfm2_vl.processor import load_normalisation
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.tile_vision_model import CELL_EPS
from trencadis.multimodal.vit.vit_block import ViTBlock, run_blocks, scale_and_shift


class ResizedPatchEmbed:
    """Patch embedding of a VISION launch: projected patches plus position embeddings resized to each image."""

    position_table: Tensor  # [side x side, hidden]

    def __init__(self, ops: Ops, patch: Linear, scale_shift: tuple[Tensor, ...]) -> None:
        self.ops, self.patch, self.scale_shift = ops, patch, scale_shift

    def __call__(self, pixels: Tensor, near: Tensor, share: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns (x, residual), [s, hidden] of ``dtype``; a residual of None is zeros.

        ``near`` and ``share``: the fields ``position_rows`` and ``position_weights`` of ``VisionTensors``.
        """
        ops, (scale, shift) = self.ops, self.scale_shift
        x = self.patch(ops.patches(pixels, scale, shift, dtype))
        x = x + ops.interpolate(self.position_table, near, share)
        return x, ops.first_residual(x)


class CellProjector:
    """The end of a VISION launch: norms patches, joins and norms those of each cell, and two linear layers."""

    def __init__(self, backend: Backend, c: Lfm2VisionConfig) -> None:
        ops, comm, width = backend.ops, backend.comm, c.cell_width
        self.ops, self.config = ops, c
        self.norm = norm_of(LAYER, ops, c.hidden, c.eps)
        self.cell_norm = norm_of(LAYER, ops, width, CELL_EPS) if c.cell_norm else None
        part = (ColumnPart("linear_1", c.inner, 1),)
        self.linear_1 = ColumnParallelLinear(ops, comm, width, part, bias=c.projector_bias)
        self.linear_2 = RowParallelLinear(ops, comm, c.inner, c.out_hidden, bias=c.projector_bias)

    def load(self, source: WeightSource) -> None:
        at = "visual.projector"
        self.norm.load(source, "visual.last_norm")
        if self.cell_norm is not None:
            self.cell_norm.load(source, f"{at}.cell_norm")
        self.linear_1.load(source, at)
        self.linear_2.load(source, f"{at}.linear_2")

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores [cells, out_hidden] in ``arena[rows]``; x and residual are [cells, slots of a cell, hidden]."""
        cells = self.norm(x.flatten(0, 1), residual.flatten(0, 1))[0].view(len(rows), -1)
        if self.cell_norm is not None:
            cells = self.cell_norm(cells)[0]
        inner = self.ops.act(self.linear_1(cells), self.config.projector)
        self.ops.scatter_rows(arena, rows, self.linear_2(inner))

    def nbytes(self) -> int:
        norms = self.norm.nbytes() + (0 if self.cell_norm is None else self.cell_norm.nbytes())
        return norms + self.linear_1.bytes + self.linear_2.bytes


class Siglip2Tower:
    """The whole tower: uint8 patches to arena rows of cells, in slot order."""

    def __init__(self, backend: Backend, c: Lfm2VisionConfig, normalisation: PixelNormalisation) -> None:
        ops = backend.ops
        self.config, self.ops, self.dtype = c, ops, backend.dtype
        self.patch = Linear(ops, backend.comm)
        self.blocks = [ViTBlock(backend, c, True, c.eps, c.activation) for _ in range(c.depth)]
        self.projector = CellProjector(backend, c)
        made = tuple(t.to(backend.device) for t in scale_and_shift(normalisation, c.slot.values // CHANNELS))
        self.patch_embed = ResizedPatchEmbed(ops, self.patch, made)

    def load(self, source: WeightSource) -> None:
        c, at = self.config, "visual.embeddings"
        # The checkpoint's columns are [row, column, channel]; a slot's values are [channel, row, column].
        stored = source.take(f"{at}.patch_embedding.weight", (c.hidden, c.slot.values))
        columns = stored.view(c.hidden, c.patch, c.patch, CHANNELS).permute(0, 3, 1, 2).reshape(c.hidden, -1)
        self.patch.pack(columns.contiguous(), source.take(f"{at}.patch_embedding.bias", (c.hidden,)))
        self.patch_embed.position_table = source.take(f"{at}.position_embedding.weight", (c.side**2, c.hidden))
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        self.projector.load(source)

    def __call__(self, inputs: VisionTensors, arena: Tensor) -> None:
        """Writes image tokens, [cells, out_hidden] of the backend's dtype, to ``arena[inputs.rows]``."""
        ops, i = self.ops, inputs
        stream = [*ops.region(self.patch_embed, i.pixels, i.position_rows, i.position_weights, self.dtype)]
        x, residual = run_blocks(ops, self.blocks, stream, None, ops.prepare_segments(i.segments))
        cells = (len(i.rows), -1, x.shape[-1])
        ops.by_rows(self.projector, (x.view(cells), residual.view(cells), i.rows), arena)

    def nbytes(self) -> int:
        own = self.patch.bytes + self.patch_embed.position_table.nbytes + self.projector.nbytes()
        return own + sum(block.nbytes() for block in self.blocks)


class Lfm2Vl(TowerDecoder):
    """``core.models.model_and_ops_api.Model`` with images, which the first pipeline stage encodes."""

    tower: Siglip2Tower

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, Lfm2VisionConfig)
        self.vision_config = config.vision
        if self.share.starts:
            self.tower = Siglip2Tower(self.tower_backend, config.vision, load_normalisation(config))

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images cell by cell; the rest of ``slots`` is padding."""
        c = self.vision_config
        packed = pack_whole_images(images, slots, c.slot.values, c.merge)
        return add_resized_positions(packed, images, c.side, c.merge)


def make(config: ModelConfig, backend: Backend) -> Lfm2Vl:
    """Builds the model; named in the family's record."""
    return Lfm2Vl(config, backend)
