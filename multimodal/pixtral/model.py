"""Mistral's decoder with Pixtral's tower.

A model over images of any size: a tower with rotary positions by row and column, RMS norms and no biases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import RMS, ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend, Ops, VisionTensors
from trencadis.core.launch_inputs import VisionInputs
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
from trencadis.core.models.rotary_embedding import inverse_frequencies
from trencadis.core.step import Encode
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation
from trencadis.multimodal.pixtral.config import EPS, PixtralVisionConfig
from trencadis.multimodal.pixtral.processor import load_normalisation
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vit_block import TowerInputs, ViTBlock, run_blocks, scale_and_shift


def axial_frequencies(head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns frequencies and their axes, [head_dim / 2] each: those of even index belong to the row, others to the
    column.
    """
    every = inverse_frequencies(head_dim, theta)
    return torch.cat([every[0::2], every[1::2]]), torch.arange(2).repeat_interleave(head_dim // 4)


class PixtralPatchEmbed:
    """Patch embedding of a VISION launch: normalised patches and their 2D rotary factors."""

    def __init__(
        self,
        ops: Ops,
        patch: Linear,
        norm: Norm,
        scale_shift: tuple[Tensor, Tensor],
        frequencies: tuple[Tensor, Tensor],
    ) -> None:
        self.ops, self.patch, self.norm, self.scale_shift, self.frequencies = ops, patch, norm, scale_shift, frequencies

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> TowerInputs:
        """Returns the inputs of the first layer, of ``dtype``."""
        x = self.norm(self.patch(self.ops.patches(pixels, *self.scale_shift, dtype)))[0]
        return TowerInputs(x, self.ops.first_residual(x), self.ops.rotary(position.t(), *self.frequencies))


class PixtralProjector:
    """Projector of a VISION launch: merges cells where the model has a patch merger, projects them, and stores them
    in the arena.
    """

    def __init__(self, backend: Backend, c: PixtralVisionConfig) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.config = ops, c
        self.norm = norm_of(RMS, ops, c.hidden, c.merge_eps) if c.has_merger else None
        self.merger = Linear(ops, comm) if c.has_merger else None
        part = (ColumnPart("linear_1", c.out_hidden, 1),)
        self.linear_1 = ColumnParallelLinear(ops, comm, c.hidden, part, bias=c.projector_bias)
        self.linear_2 = RowParallelLinear(ops, comm, c.out_hidden, c.out_hidden, bias=c.projector_bias)

    def load(self, source: WeightSource) -> None:
        c = self.config
        if self.norm is not None and self.merger is not None:
            self.norm.load(source, "visual.projector.norm")
            shape = (c.hidden, c.hidden * c.merge**2)
            weight = source.take("visual.merger.weight", shape).view(c.hidden, c.hidden, c.merge**2)
            # The checkpoint's columns are [feature, patch of the cell]; a cell's slots are [patch, feature].
            self.merger.pack(weight.transpose(1, 2).reshape(shape), None)
        self.linear_1.load(source, "visual.projector")
        self.linear_2.load(source, "visual.projector.linear_2")

    def list_layers(self) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters."""
        yield TowerLayer("visual.projector", self.linear_1)
        yield TowerLayer("visual.projector.linear_2", self.linear_2)

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, adapters: AdapterRows | None, arena: Tensor) -> None:
        """Stores tokens in ``arena[rows]``; x and residual are [cells, values of a cell].

        ``adapters``: those of the cells.
        """
        width = self.config.hidden
        if self.norm is not None and self.merger is not None:
            normed = self.norm(x.reshape(-1, width), residual.reshape(-1, width))[0]
            x = self.merger(normed.view(len(rows), -1))
        else:
            x = x + residual
        inner = self.ops.act(self.linear_1(x, adapters), self.config.projector)
        self.ops.scatter_rows(arena, rows, self.linear_2(inner, adapters))

    def nbytes(self) -> int:
        merging = 0 if self.norm is None or self.merger is None else self.norm.nbytes() + self.merger.bytes
        return merging + self.linear_1.bytes + self.linear_2.bytes


class PixtralModel(Decoder):
    """``VisionModel`` of a decoder with Pixtral's tower."""

    def __init__(self, config: ModelConfig, backend: Backend, normalisation: PixelNormalisation) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, PixtralVisionConfig)
        if not self.share.starts:
            return
        tower = replicate_layers(backend) if config.encoder_data_parallel else backend
        c, ops = config.vision, backend.ops
        self.tower, self.patch = c, Linear(ops, tower.comm)
        self.first_norm = norm_of(RMS, ops, c.hidden, EPS)
        self.blocks = [ViTBlock(tower, c, True, EPS, c.activation) for _ in range(c.depth)]
        scale, shift = (t.to(backend.device) for t in scale_and_shift(normalisation, c.slot.values // CHANNELS))
        frequency, axis = (t.to(backend.device) for t in axial_frequencies(c.head_dim, c.theta))
        self.patch_embed = PixtralPatchEmbed(ops, self.patch, self.first_norm, (scale, shift), (frequency, axis))
        self.projector = PixtralProjector(tower, c)

    def load_from(self, source: WeightSource) -> None:
        super().load_from(source)
        if not self.share.starts:
            return
        c = self.tower
        stored = (c.hidden, CHANNELS, c.patch, c.patch)
        self.patch.pack(source.take("visual.patch_conv.weight", stored).reshape(c.hidden, -1), None)
        self.first_norm.load(source, "visual.ln_pre")
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        self.projector.load(source)

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes their tokens to ``arena[rows]``."""
        ops, adapters = self.ops, self.prepare_image_adapters(inputs)
        *stream, rotary = ops.region(self.patch_embed, inputs.pixels, inputs.position, self.backend.dtype)
        segments = ops.prepare_segments(inputs.segments)
        x, residual = run_blocks(ops, self.blocks, stream, rotary, segments, adapters)
        count = len(inputs.rows)
        cells = x.view(count, -1), residual.view(count, -1), inputs.rows, adapters.cells
        ops.by_rows(self.projector, cells, self.persistent.arena)

    def list_tower_layers(self) -> Iterator[TowerLayer]:
        if not self.share.starts:
            return
        for i, block in enumerate(self.blocks):
            yield from block.list_layers(f"visual.blocks.{i}")
        yield from self.projector.list_layers()

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images one after the other, each from a window's start on; the rest of ``slots`` is padding."""
        return pack_whole_images(images, slots, self.tower.slot.values, self.tower.merge)

    def nbytes(self) -> int:
        if not self.share.starts:
            return super().nbytes()
        own = self.patch.bytes + self.first_norm.nbytes() + self.projector.nbytes()
        return super().nbytes() + own + sum(block.nbytes() for block in self.blocks)


def make(config: ModelConfig, backend: Backend) -> PixtralModel:
    """Builds the model; named in the records of its families."""
    return PixtralModel(config, backend, load_normalisation(config))
