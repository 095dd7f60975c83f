"""MiniCPM-V 4.6: Qwen3.5's decoder, and its tower on packed slots, whose later layers take one row for four patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.checkpoint.model_config import LAYER, ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend, Rotary, Segments, VisionTensors
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.models.decoder_with_vision_tower import TowerDecoder
from trencadis.core.models.linear_and_embedding import Linear
from trencadis.core.models.mlp_and_norms import norm_of
from trencadis.core.step import Encode
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.minicpmv4_6.config import SIDE, WINDOW, MiniCPMVisionConfig
from trencadis.multimodal.minicpmv4_6.processor import load_normalisation, nearest_positions
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.tile_vision_model import TilePatchEmbed
from trencadis.multimodal.vit.vit_block import ViTBlock, run_blocks, scale_and_shift

PROJECTOR_EPS = 1e-6
"""Epsilon of the projector's norm; no checkpoint has another value."""

MERGED_SLOTS = WINDOW_SLOTS // WINDOW
"""Rows that the merger leaves of a window of slots."""


class MergedBlock(ViTBlock):
    """A layer behind the merger: each window of slots has 16 rows, which attend as the first slots of the window."""

    def _attend(self, x: Tensor, rotary: Rotary | None, segments: Segments, rows: AdapterRows | None = None) -> Tensor:
        s, d = x.shape[0], self.head_dim
        shape = (s // MERGED_SLOTS, MERGED_SLOTS, -1)
        behind = (0, 0, 0, WINDOW_SLOTS - MERGED_SLOTS)
        parts = torch.split(self.qkv(x, rows), self.width, dim=1)
        q, k, v = (functional.pad(t.reshape(shape), behind).view(s * WINDOW, -1, d) for t in parts)
        out = self.attend(q, k, v, segments, d**-0.5).reshape(shape[0], WINDOW_SLOTS, -1)
        return out[:, :MERGED_SLOTS].reshape(s, -1)


class WindowMerger:
    """Merges four patches to one row: attention among them, then an MLP over all of them beside their mean."""

    def __init__(self, backend: Backend, c: MiniCPMVisionConfig) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.config = ops, c
        self.norm, self.wide_norm = norm_of(LAYER, ops, c.hidden, c.eps), norm_of(LAYER, ops, c.window_width, c.eps)
        self.qkv, self.out, self.up, self.down = (Linear(ops, comm) for _ in range(4))

    def load(self, source: WeightSource) -> None:
        c, at = self.config, "visual.vit_merger"

        def take(name: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
            return source.take(f"{at}.{name}.weight", (rows, columns)), source.take(f"{at}.{name}.bias", (rows,))

        self.norm.load(source, f"{at}.norm1")
        self.wide_norm.load(source, f"{at}.pre_norm")
        parts = [take(f"self_attn.{name}_proj", c.hidden, c.hidden) for name in "qkv"]
        self.qkv.pack(torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts]))
        self.out.pack(*take("self_attn.out_proj", c.hidden, c.hidden))
        self.up.pack(*take("linear_1", WINDOW * c.intermediate, c.window_width))
        self.down.pack(*take("linear_2", c.hidden, WINDOW * c.intermediate))

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Maps the slots' x and residual, [s, hidden] each, to those of the rows, [s / 4, hidden] each."""
        normed, stream = self.norm(x, residual)
        stream = stream + self.out(self._attend(normed))
        mean = stream.view(-1, WINDOW, self.config.hidden).mean(1)
        wide = self.wide_norm(stream.view(-1, self.config.window_width))[0]
        return self.down(self.ops.act(self.up(wide), "gelu_tanh")), mean

    def _attend(self, x: Tensor) -> Tensor:
        """Returns the attention of each slot to the four of its window, [s, hidden].

        It multiplies values one by one: there are too few of them for a product of matrices.
        """
        c = self.config
        q, k, v = (t.reshape(-1, WINDOW, c.heads, c.head_dim) for t in torch.split(self.qkv(x), c.hidden, dim=1))
        scores = [(q * k[:, i : i + 1]).float().sum(-1) for i in range(WINDOW)]
        weights = (torch.stack(scores, -1) * c.head_dim**-0.5).softmax(-1).to(x.dtype)
        out: Tensor = weights[..., :1] * v[:, :1]
        for i in range(1, WINDOW):
            out = out + weights[..., i : i + 1] * v[:, i : i + 1]
        return out.reshape(-1, c.hidden)

    def nbytes(self) -> int:
        matrices = (self.qkv, self.out, self.up, self.down)
        return self.norm.nbytes() + self.wide_norm.nbytes() + sum(m.bytes for m in matrices)


class MiniCPMProjector:
    """The end of a VISION launch: a norm, then two linear layers over four rows each."""

    def __init__(self, backend: Backend, c: MiniCPMVisionConfig) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.config = ops, c
        self.norm = norm_of(LAYER, ops, c.hidden, c.eps)
        self.wide_norm = norm_of(LAYER, ops, c.window_width, PROJECTOR_EPS)
        self.up, self.down = Linear(ops, comm), Linear(ops, comm)

    def load(self, source: WeightSource) -> None:
        c, at = self.config, "visual.projector.mlp.0"
        self.norm.load(source, "visual.post_layernorm")
        self.wide_norm.load(source, f"{at}.pre_norm")
        for linear, name, rows in ((self.up, "linear_1", c.window_width), (self.down, "linear_2", c.out_hidden)):
            weight = source.take(f"{at}.{name}.weight", (rows, c.window_width))
            linear.pack(weight, source.take(f"{at}.{name}.bias", (rows,)))

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores tokens in ``arena[rows]``; x and residual are [tokens, values of four rows]."""
        width = self.config.hidden
        normed = self.norm(x.reshape(-1, width), residual.reshape(-1, width))[0]
        wide = self.wide_norm(normed.view(len(rows), -1))[0]
        self.ops.scatter_rows(arena, rows, self.down(self.ops.act(self.up(wide), "gelu")))

    def nbytes(self) -> int:
        return self.norm.nbytes() + self.wide_norm.nbytes() + self.up.bytes + self.down.bytes


class MiniCPMTower:
    """Encodes packed slots and stores a row for each cell of 16 in the arena."""

    def __init__(self, backend: Backend, c: MiniCPMVisionConfig, normalisation: PixelNormalisation) -> None:
        self.ops, self.config, self.dtype = backend.ops, c, backend.dtype
        self.patch = Linear(backend.ops, backend.comm)
        scale, shift = (t.to(backend.device) for t in scale_and_shift(normalisation, c.slot.values // CHANNELS))
        self.patch_embed = TilePatchEmbed(backend.ops, self.patch, None, (scale, shift))
        self.blocks = [ViTBlock(backend, c, True, c.eps, c.activation) for _ in range(c.merged_from)]
        self.merger = WindowMerger(backend, c)
        self.merged = [MergedBlock(backend, c, True, c.eps, c.activation) for _ in range(c.depth - c.merged_from)]
        self.projector = MiniCPMProjector(backend, c)

    def load(self, source: WeightSource) -> None:
        c, at = self.config, "visual.embeddings"
        stored = (c.hidden, CHANNELS, c.patch, c.patch)
        self.patch.pack(source.take(f"{at}.patch_embedding.weight", stored).reshape(c.hidden, -1), None)
        table = source.take(f"{at}.position_embedding.weight", (c.side**2, c.hidden))
        table = table + source.take(f"{at}.patch_embedding.bias", (c.hidden,))
        self.patch_embed.position_table = torch.cat([torch.zeros_like(table[:1]), table])
        for i, block in enumerate((*self.blocks, *self.merged)):
            block.load(source, f"visual.blocks.{i}")
        self.merger.load(source)
        self.projector.load(source)

    def __call__(self, inputs: VisionTensors, arena: Tensor) -> None:
        ops = self.ops
        stream: list[Tensor | None] = [*ops.region(self.patch_embed, inputs.pixels, inputs.position, self.dtype)]
        stream = [*run_blocks(ops, self.blocks, stream, None, ops.prepare_segments(inputs.segments))]
        stream = [*ops.region(self.merger, *stream)]
        if self.merged:
            segments = ops.prepare_segments(inputs.segments, WINDOW)
            stream = [*run_blocks(ops, self.merged, stream, None, segments)]
        x, residual = stream
        assert x is not None and residual is not None
        count = len(inputs.rows)
        ops.by_rows(self.projector, (x.view(count, -1), residual.view(count, -1), inputs.rows), arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs slices one after the other, each from a window's start on; the rest of ``slots`` is padding."""
        packed, slot = pack_whole_images(images, slots, self.config.slot.values, SIDE), 0
        packed.position[:] = 0
        for image in images:
            _, h, w = image.grid
            packed.position[slot : slot + h * w, 0] = 1 + nearest_positions(h, w, self.config.side)
            slot += image.slots
        return packed

    def nbytes(self) -> int:
        own = self.patch.bytes + self.patch_embed.position_table.nbytes + self.merger.nbytes() + self.projector.nbytes()
        return own + sum(block.nbytes() for block in (*self.blocks, *self.merged))


class MiniCPMModel(TowerDecoder):
    """``VisionModel`` of MiniCPM-V 4.6; the first pipeline stage encodes images."""

    tower: MiniCPMTower

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, MiniCPMVisionConfig)
        if self.share.starts:
            self.tower = MiniCPMTower(self.tower_backend, config.vision, load_normalisation(config))

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs slices; the rest of ``slots`` is padding."""
        return self.tower.pack(images, slots)


def make(config: ModelConfig, backend: Backend) -> MiniCPMModel:
    """Builds the model; named in the family's record."""
    return MiniCPMModel(config, backend)
