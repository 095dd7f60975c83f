"""GLM-4.1V: GLM-4's decoder with positions on three axes, and its tower on packed slots.

The tower has sampled positions, and cells that a convolution joins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import RMS, ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend, Ops, VisionTensors
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.models.decoder_with_vision_tower import AdaptedTowerDecoder
from trencadis.core.models.linear_and_embedding import NO_ADAPTERS, ImageAdapters, Linear, TowerLayer
from trencadis.core.models.mlp_and_norms import GatedMLP, LayerNorm, Norm, norm_of
from trencadis.core.models.rotary_embedding import vision_frequencies
from trencadis.core.step import Encode
from trencadis.multimodal.glm4v.config import CHANNELS, FRAMES, RULES, Glm4vVisionConfig, add_sampled_positions
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP, PixelNormalisation
from trencadis.multimodal.qwen2_vl.preprocessor_config import read_preprocessor_config
from trencadis.multimodal.vit.vit_block import TowerInputs, ViTBlock, run_blocks, scale_and_shift

MERGER_EPS = 1e-5
"""Epsilon of the merger's layer norm; no checkpoint has another value."""


class Glm4vPatchEmbed:
    """Patch embedding of a VISION launch: normed patches plus sampled position embeddings, and rotary factors."""

    position_table: Tensor | None = None  # [side x side, hidden]; None: positions are not learned

    def __init__(
        self, ops: Ops, patch: Linear, norm: Norm | None, scale_shift: tuple[Tensor, ...],
        frequencies: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        self.ops, self.patch, self.norm, self.scale_shift, self.frequencies = ops, patch, norm, scale_shift, frequencies

    def __call__(
        self, pixels: Tensor, position: Tensor, near: Tensor | None, share: Tensor | None, dtype: torch.dtype
    ) -> TowerInputs:
        """Returns the inputs of the first layer, of ``dtype``. The arguments are fields of ``VisionTensors``."""
        ops, (scale, shift) = self.ops, self.scale_shift
        x = self.patch(ops.patches(pixels, scale, shift, dtype))
        if self.norm is not None:
            x = self.norm(x)[0]
        if self.position_table is not None and near is not None and share is not None:
            x = x + ops.interpolate(self.position_table, near, share)
        inv_freq, axis = self.frequencies
        return TowerInputs(x, ops.first_residual(x), ops.rotary(position.t(), inv_freq, axis))


class Glm4vMerger:
    """The end of a VISION launch: norms slots, joins the slots of each cell, projects, and stores rows in the arena."""

    def __init__(self, backend: Backend, c: Glm4vVisionConfig) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.config = ops, c
        self.norm = norm_of(RMS, ops, c.hidden, c.eps)
        self.join, self.proj = Linear(ops, comm), Linear(ops, comm)
        self.proj_norm = LayerNorm(ops, c.out_hidden, MERGER_EPS)
        self.mlp = GatedMLP(ops, comm, c.out_hidden, c.context, act=c.activation)

    def load(self, source: WeightSource, name: str) -> None:
        c = self.config
        self.norm.load(source, f"{name}.post_layernorm")
        stored = source.take(f"{name}.downsample.weight", (c.out_hidden, c.hidden, c.merge, c.merge))
        # A cell's slots are [row, column, feature]; the checkpoint's columns are [feature, row, column].
        weight = stored.permute(0, 2, 3, 1).reshape(c.out_hidden, -1).contiguous()
        self.join.pack(weight, source.take(f"{name}.downsample.bias", (c.out_hidden,)))
        self.proj.pack(source.take(f"{name}.merger.proj.weight", (c.out_hidden, c.out_hidden)), None)
        self.proj_norm.load(source, f"{name}.merger.post_projection_norm")
        self.mlp.load(source, f"{name}.merger")

    def list_layers(self, name: str) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters; ``name``: as in ``load``."""
        yield TowerLayer(f"{name}.merger.proj", self.proj, self.config.out_hidden, self.config.out_hidden)
        yield from self.mlp.list_layers(f"{name}.merger")

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, adapters: AdapterRows | None, arena: Tensor) -> None:
        """Stores [cells, out_hidden] in ``arena[rows]``; x and residual are [cells, slots of a cell, hidden].

        ``adapters``: those of the cells.
        """
        normed = self.norm(x.flatten(0, 1), residual.flatten(0, 1))[0]
        projected = self.proj(self.join(normed.view(len(rows), -1)), adapters)
        inner = self.ops.act(self.proj_norm(projected)[0], "gelu")
        self.ops.scatter_rows(arena, rows, self.mlp(inner, adapters))

    def nbytes(self) -> int:
        norms = self.norm.nbytes() + self.proj_norm.nbytes()
        return norms + self.join.bytes + self.proj.bytes + self.mlp.nbytes()


class Glm4vTower:
    """The whole tower: uint8 patches to arena rows of cells, in slot order."""

    def __init__(self, backend: Backend, c: Glm4vVisionConfig, normalisation: PixelNormalisation) -> None:
        ops = backend.ops
        self.config, self.ops, self.dtype = c, ops, backend.dtype
        self.patch = Linear(ops, backend.comm)
        self.norm = norm_of(RMS, ops, c.hidden, c.eps) if c.side else None
        self.blocks = [ViTBlock(backend, c, True, c.eps, c.activation) for _ in range(c.depth)]
        self.merger = Glm4vMerger(backend, c)
        made = scale_and_shift(normalisation, c.slot.values // CHANNELS), vision_frequencies(c.head_dim, c.rope_theta)
        scale_shift, frequencies = (tuple(t.to(backend.device) for t in some) for some in made)
        self.patch_embed = Glm4vPatchEmbed(ops, self.patch, self.norm, scale_shift, frequencies)

    def load(self, source: WeightSource) -> None:
        c = self.config
        stored = (c.hidden, CHANNELS, FRAMES, c.patch, c.patch)
        patch = source.take("visual.patch_embed.proj.weight", stored).reshape(c.hidden, -1)
        self.patch.pack(patch, source.take("visual.patch_embed.proj.bias", (c.hidden,)))
        if self.norm is not None:
            self.norm.load(source, "visual.post_conv_layernorm")
            table = source.take("visual.embeddings.position_embedding.weight", (c.side**2, c.hidden))
            self.patch_embed.position_table = table
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        self.merger.load(source, "visual")

    def list_layers(self) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters."""
        for i, block in enumerate(self.blocks):
            yield from block.list_layers(f"visual.blocks.{i}")
        yield from self.merger.list_layers("visual")

    def __call__(self, inputs: VisionTensors, arena: Tensor, adapters: ImageAdapters = NO_ADAPTERS) -> None:
        """Writes image tokens, [s / 4, out_hidden] of the backend's dtype, to ``arena[inputs.rows]``."""
        ops, i = self.ops, inputs
        *stream, rotary = ops.region(
            self.patch_embed, i.pixels, i.position, i.position_rows, i.position_weights, self.dtype
        )
        segments = ops.prepare_segments(i.segments)
        x, residual = run_blocks(ops, self.blocks, stream, rotary, segments, adapters)
        cells = (len(i.rows), -1, x.shape[-1])
        ops.by_rows(self.merger, (x.view(cells), residual.view(cells), i.rows, adapters.cells), arena)

    def nbytes(self) -> int:
        table = self.patch_embed.position_table
        own = self.patch.bytes + (self.norm.nbytes() if self.norm else 0) + (0 if table is None else table.nbytes)
        return own + self.merger.nbytes() + sum(block.nbytes() for block in self.blocks)


class Glm4v(AdaptedTowerDecoder):
    """``core.models.model_and_ops_api.Model`` with images, which the first pipeline stage encodes."""

    tower: Glm4vTower

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, Glm4vVisionConfig)
        self.vision_config = config.vision
        if not self.share.starts:
            return
        read = read_preprocessor_config(config.path, patch=config.vision.patch, rules=RULES)
        normalisation = CLIP if read is None else read.normalisation
        self.tower = Glm4vTower(self.tower_backend, config.vision, normalisation)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images cell by cell; the rest of ``slots`` is padding."""
        c = self.vision_config
        packed = pack_whole_images(images, slots, c.slot.values, c.merge)
        return add_sampled_positions(packed, images, c.side, c.merge) if c.side else packed


def make(config: ModelConfig, backend: Backend) -> Glm4v:
    """Builds the model; named in the families' records."""
    return Glm4v(config, backend)
