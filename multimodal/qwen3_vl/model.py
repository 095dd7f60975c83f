"""Qwen3-VL: the Qwen3 decoder with interleaved positions on three axes, and the DeepStack tower on packed slots.

The tower has interpolated positions, and a part of each row comes from several layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend, Ops, Rotary, VisionTensors
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
from trencadis.core.models.mlp_and_norms import LayerNorm
from trencadis.core.models.rotary_embedding import vision_frequencies
from trencadis.core.step import Encode
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.pixel_normalisation_and_fixed_point import IMAGENET_STANDARD, PixelNormalisation
from trencadis.multimodal.qwen2_vl.preprocessor_config import read_preprocessor_config
from trencadis.multimodal.qwen3_vl.config import CHANNELS, FRAMES, DeepStackVisionConfig, add_interpolated_positions
from trencadis.multimodal.vit.vit_block import ViTBlock, run_blocks, scale_and_shift

EPS = 1e-6
"""Epsilon of every norm of the tower; no checkpoint has another value."""


class DeepStackInputs(NamedTuple):
    """What the first layer of the tower takes: ``x`` [s, hidden], the ``residual`` like it or None for zeros, rotary
    factors, and the arena ``rows`` of each part, int64 [s / 4].
    """

    x: Tensor
    residual: Tensor | None
    rotary: Rotary
    rows: tuple[Tensor, ...]


class DeepStackPatchEmbed:
    """Patch embedding of a VISION launch.

    Computes patches plus interpolated position embeddings, rotary factors, and the arena rows of each DeepStack level.
    """

    position_table: Tensor  # [side x side, hidden]

    def __init__(
        self,
        ops: Ops,
        patch: Linear,
        scale_shift: tuple[Tensor, Tensor],
        frequencies: tuple[Tensor, Tensor],
        parts: int,
    ) -> None:
        self.ops, self.patch, self.scale_shift, self.frequencies, self.parts = (
            ops,
            patch,
            scale_shift,
            frequencies,
            parts,
        )

    def __call__(
        self, pixels: Tensor, position: Tensor, near: Tensor, share: Tensor, rows: Tensor, dtype: torch.dtype
    ) -> DeepStackInputs:
        """Returns the inputs of the first layer, of ``dtype``.

        The arguments are fields of ``VisionTensors``.
        """
        ops = self.ops
        x = self.patch(ops.patches(pixels, *self.scale_shift, dtype)) + ops.interpolate(
            self.position_table, near, share
        )
        parts = tuple(rows * self.parts + part for part in range(self.parts))
        return DeepStackInputs(x, ops.first_residual(x), ops.rotary(position.t(), *self.frequencies), parts)


class DeepStackMerger:
    """Patch merger of one DeepStack level: a norm over each patch or each merge cell, then two linear layers."""

    def __init__(self, backend: Backend, c: DeepStackVisionConfig, norms_cell: bool) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.norms_cell = ops, norms_cell
        self.norm = LayerNorm(ops, c.merged_width if norms_cell else c.hidden, EPS)
        self.fc1 = ColumnParallelLinear(
            ops, comm, c.merged_width, (ColumnPart("linear_fc1", c.merged_width, 1),), bias=True
        )
        self.fc2 = RowParallelLinear(ops, comm, c.merged_width, c.out_hidden, bias=True)

    def load(self, source: WeightSource, name: str) -> None:
        self.norm.load(source, f"{name}.norm")
        self.fc1.load(source, name)
        self.fc2.load(source, f"{name}.linear_fc2")

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, adapters: AdapterRows | None, arena: Tensor) -> None:
        """Stores [cells, out_hidden] in ``arena[rows]``; x and residual are [cells, slots of a cell, hidden].

        ``adapters``: those of the cells. The sum is a new tensor: a norm may store its sum in x, which later layers
        still read.
        """
        wide = (len(rows), -1) if self.norms_cell else (-1, x.shape[-1])
        normed = self.norm((x + residual).view(wide))[0].view(len(rows), -1)
        self.ops.scatter_rows(arena, rows, self.fc2(self.ops.act(self.fc1(normed, adapters), "gelu"), adapters))

    def nbytes(self) -> int:
        return self.norm.nbytes() + self.fc1.bytes + self.fc2.bytes


class DeepStackTower:
    """The whole vision tower: uint8 patches to arena rows of merge cells, in slot order."""

    def __init__(
        self, backend: Backend, c: DeepStackVisionConfig, normalisation: PixelNormalisation, unit: int = 1
    ) -> None:
        ops, comm = backend.ops, backend.comm
        self.config, self.ops, self.dtype = c, ops, backend.dtype
        self.patch = Linear(ops, comm)
        self.blocks = [ViTBlock(backend, c, True, EPS, c.activation, unit) for _ in range(c.depth)]
        self.mergers = [DeepStackMerger(backend, c, norms_cell=part > 0) for part in range(1 + c.deepstack)]
        self.padded_columns = align_up(c.slot.values, unit) - c.slot.values
        wide = (
            functional.pad(t, (0, self.padded_columns))
            for t in scale_and_shift(normalisation, c.slot.values // CHANNELS)
        )
        scale_shift = tuple(t.to(backend.device) for t in wide)
        frequencies = tuple(t.to(backend.device) for t in vision_frequencies(c.head_dim, c.rope_theta))
        self.patch_embed = DeepStackPatchEmbed(
            ops, self.patch, (scale_shift[0], scale_shift[1]), (frequencies[0], frequencies[1]), 1 + c.deepstack
        )

    def load(self, source: WeightSource) -> None:
        c = self.config
        stored = (c.hidden, CHANNELS, FRAMES, c.patch, c.patch)
        patch = source.take("visual.patch_embed.proj.weight", stored).reshape(c.hidden, -1)
        bias = source.take("visual.patch_embed.proj.bias", (c.hidden,))
        self.patch.pack(functional.pad(patch, (0, self.padded_columns)) if self.padded_columns else patch, bias)
        self.patch_embed.position_table = source.take("visual.pos_embed.weight", (c.side**2, c.hidden))
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        for merger, at in zip(self.mergers, c.merger_names, strict=True):
            merger.load(source, at)

    def list_layers(self) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters."""
        for i, block in enumerate(self.blocks):
            yield from block.list_layers(f"visual.blocks.{i}")
        for merger, at in zip(self.mergers, self.config.merger_names, strict=True):
            yield TowerLayer(at, merger.fc1)
            yield TowerLayer(f"{at}.linear_fc2", merger.fc2)

    def __call__(self, inputs: VisionTensors, arena: Tensor, adapters: ImageAdapters = NO_ADAPTERS) -> None:
        """Writes every part of ``inputs.rows``, each [out_hidden] of the backend's dtype, to the arena."""
        ops, i = self.ops, inputs
        assert i.position_rows is not None and i.position_weights is not None
        *stream, rotary, rows = ops.region(
            self.patch_embed, i.pixels, i.position, i.position_rows, i.position_weights, i.rows, self.dtype
        )
        segments = ops.prepare_segments(i.segments)
        cells = (len(i.rows), -1, self.config.hidden)

        def store(part: int, x: Tensor, residual: Tensor) -> None:
            ops.by_rows(self.mergers[part], (x.view(cells), residual.view(cells), rows[part], adapters.cells), arena)

        def store_deepstack(number: int, x: Tensor, residual: Tensor) -> None:
            if number in self.config.deepstack_layers:
                store(1 + self.config.deepstack_layers.index(number), x, residual)

        store(0, *run_blocks(ops, self.blocks, stream, rotary, segments, adapters, store_deepstack))

    def nbytes(self) -> int:
        own = (
            self.patch.bytes + self.patch_embed.position_table.nbytes + sum(merger.nbytes() for merger in self.mergers)
        )
        return own + sum(block.nbytes() for block in self.blocks)


class Qwen3VL(AdaptedTowerDecoder):
    """``core.models.model_and_ops_api.Model`` with images, which the first pipeline stage encodes."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, DeepStackVisionConfig)
        self.vision_config = config.vision
        if not self.share.starts:
            return
        read = read_preprocessor_config(config.path, patch=config.vision.patch)
        normalisation = IMAGENET_STANDARD if read is None else read.normalisation
        unit = config.alignment_unit(backend.policy.aligned)
        self.tower = DeepStackTower(self.tower_backend, config.vision, normalisation, unit)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images cell by cell; the rest of ``slots`` is padding."""
        c = self.vision_config
        return add_interpolated_positions(
            pack_whole_images(images, slots, c.slot.values, c.merge), images, c.side, c.merge
        )


def make(config: ModelConfig, backend: Backend) -> Qwen3VL:
    """Builds the model; named in the families' records."""
    return Qwen3VL(config, backend)
