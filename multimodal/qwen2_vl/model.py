"""Qwen2-VL: the Qwen2 decoder with M-RoPE (``TextConfig.mrope_section``) and the vision tower.

The tower, which Qwen2.5-VL shares, works on packed slots: static shapes, patch embedding as a GEMM, merged cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.model_config import LAYER, RMS, ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend, Ops, VisionTensors
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.models.decoder_with_vision_tower import AdaptedTowerDecoder
from trencadis.core.models.linear_and_embedding import (
    NO_ADAPTERS,
    ColumnParallelLinear,
    ColumnPart,
    ImageAdapters,
    Linear,
    RowParallelLinear,
    TowerLayer,
)
from trencadis.core.models.mlp_and_norms import Norm, norm_of
from trencadis.core.models.rotary_embedding import vision_frequencies
from trencadis.core.step import Encode
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP, PixelNormalisation
from trencadis.multimodal.qwen2_vl.preprocessor_config import read_preprocessor_config
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import Qwen25VisionConfig
from trencadis.multimodal.vit.vit_block import TowerInputs, ViTBlock, run_blocks, scale_and_shift

EPS = 1e-6
"""Epsilon of every norm of the tower; no checkpoint has another value."""


class Qwen2VLPatchEmbed:
    """Patch embedding of a VISION launch: embedded patches and their rotary factors."""

    def __init__(
        self, ops: Ops, patch: Linear, scale_shift: tuple[Tensor, Tensor], frequencies: tuple[Tensor, Tensor]
    ) -> None:
        self.ops, self.patch, self.scale_shift, self.frequencies = ops, patch, scale_shift, frequencies

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> TowerInputs:
        """Returns the inputs of the first layer, of ``dtype``.

        Pixels are uint8 [s, patch values], positions int32 [s, 2].
        """
        x = self.patch(self.ops.patches(pixels, *self.scale_shift, dtype))
        return TowerInputs(x, self.ops.first_residual(x), self.ops.rotary(position.t(), *self.frequencies))


class Qwen2VLPatchMerger:
    """Merger of a VISION launch: merges cells into tokens and stores them in the arena."""

    def __init__(self, ops: Ops, norm: Norm, merge_in: ColumnParallelLinear, merge_out: RowParallelLinear) -> None:
        self.ops, self.norm, self.merge_in, self.merge_out = ops, norm, merge_in, merge_out

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: Tensor, adapters: AdapterRows | None, arena: Tensor
    ) -> None:
        """Stores image tokens in ``arena[rows]``; x is [merge cells, slots of a cell, hidden], as is the residual.

        ``adapters``: those of the cells.
        """
        added = None if residual is None else residual.flatten(0, 1)
        merged = self.norm(x.flatten(0, 1), added)[0].view(len(rows), -1)
        self.ops.scatter_rows(
            arena, rows, self.merge_out(self.ops.act(self.merge_in(merged, adapters), "gelu"), adapters)
        )


class Qwen2VLVisionTower:
    """The whole tower: uint8 patches [s, patch values] to image tokens [s / 4, out_hidden] in slot order.

    ``unit``: the widths of its products are padded with zeros to multiples of this.
    """

    def __init__(
        self, backend: Backend, c: Qwen25VisionConfig, normalisation: PixelNormalisation = CLIP, unit: int = 1
    ) -> None:
        ops, comm = backend.ops, backend.comm
        self.config, self.ops, self.dtype = c, ops, backend.dtype
        self.patch = Linear(ops, comm)
        self.blocks = [ViTBlock(backend, c, i in c.full_layers, EPS, c.activation, unit) for i in range(c.depth)]
        self.norm = norm_of(LAYER if c.layer_norm else RMS, ops, c.hidden, EPS)
        inner = c.hidden * c.merge * c.merge
        self.merge_in = ColumnParallelLinear(ops, comm, inner, (ColumnPart("0", inner, 1),), bias=True)
        self.merge_out = RowParallelLinear(ops, comm, inner, c.out_hidden, bias=True)
        self.padded_columns = align_up(c.patch_values, unit) - c.patch_values
        wide = (
            functional.pad(t, (0, self.padded_columns))
            for t in scale_and_shift(normalisation, c.patch_values // c.channels)
        )
        scale_shift = tuple(t.to(backend.device) for t in wide)
        frequencies = tuple(t.to(backend.device) for t in vision_frequencies(c.hidden // c.heads, c.rope_theta))
        self.patch_embed = Qwen2VLPatchEmbed(
            ops, self.patch, (scale_shift[0], scale_shift[1]), (frequencies[0], frequencies[1])
        )
        self.patch_merger = Qwen2VLPatchMerger(ops, self.norm, self.merge_in, self.merge_out)

    def load(self, source: WeightSource) -> None:
        c = self.config
        stored = (c.hidden, c.channels, c.temporal, c.patch, c.patch)
        patch = source.take("visual.patch_embed.proj.weight", stored).reshape(c.hidden, -1)
        self.patch.pack(functional.pad(patch, (0, self.padded_columns)) if self.padded_columns else patch, None)
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        self.norm.load(source, "visual.merger.ln_q")
        self.merge_in.load(source, "visual.merger.mlp")
        self.merge_out.load(source, "visual.merger.mlp.2")

    def list_layers(self) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters."""
        for i, block in enumerate(self.blocks):
            yield from block.list_layers(f"visual.blocks.{i}")
        yield TowerLayer("visual.merger.mlp", self.merge_in)
        yield TowerLayer("visual.merger.mlp.2", self.merge_out)

    def __call__(self, inputs: VisionTensors, arena: Tensor, adapters: ImageAdapters = NO_ADAPTERS) -> None:
        """Writes image tokens, [s / 4, out_hidden] of the backend's dtype, to ``arena[inputs.rows]``."""
        ops = self.ops
        *stream, rotary = ops.region(self.patch_embed, inputs.pixels, inputs.position, self.dtype)
        segments = ops.prepare_segments(inputs.segments)
        x, residual = run_blocks(ops, self.blocks, stream, rotary, segments, adapters)
        cells = (len(inputs.rows), -1, x.shape[-1])
        ops.by_rows(self.patch_merger, (x.view(cells), residual.view(cells), inputs.rows, adapters.cells), arena)

    def nbytes(self) -> int:
        parts = [self.patch.bytes, self.norm.nbytes(), self.merge_in.bytes, self.merge_out.bytes]
        return sum(parts) + sum(block.nbytes() for block in self.blocks)


class Qwen2VL(AdaptedTowerDecoder):
    """``core.models.model_and_ops_api.Model`` with images, which the first pipeline stage encodes."""

    tower: Qwen2VLVisionTower

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, Qwen25VisionConfig)
        if not self.share.starts:
            return
        read = read_preprocessor_config(config.path)
        unit = config.alignment_unit(backend.policy.aligned)
        normalisation = CLIP if read is None else read.normalisation
        self.tower = Qwen2VLVisionTower(self.tower_backend, config.vision, normalisation, unit)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images cell by cell; the rest of ``slots`` is padding."""
        return pack_whole_images(images, slots, self.tower.config.patch_values, self.tower.config.merge)


def make(config: ModelConfig, backend: Backend) -> Qwen2VL:
    """Builds the model; named in the family's record."""
    return Qwen2VL(config, backend)
