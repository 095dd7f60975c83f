"""LLaVA-1.5: Llama's decoder, and CLIP's tower on packed slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trencadis.core.backend import Backend, Ops, VisionTensors
from trencadis.core.checkpoint.model_config import LAYER, ModelConfig
from trencadis.core.layers.apart import held_whole
from trencadis.core.layers.linear import ColumnPart, Columns, Linear, Rows
from trencadis.core.layers.norm import Norm, norm_of
from trencadis.core.layers.source import Source
from trencadis.core.layout import SINK_ROW, WINDOW_SLOTS
from trencadis.core.models.decoder import Decoder
from trencadis.core.step import Encode, VisionInputs
from trencadis.multimodal.colours import Colours
from trencadis.multimodal.llava.config import CHANNELS, ClipTower
from trencadis.multimodal.llava.processor import read_settings
from trencadis.multimodal.processor import FILES
from trencadis.multimodal.vit_block import ViTBlock, spread


class ClipEntry:
    """The start of a VISION launch: patches and the class token at their places, normed."""

    table: Tensor  # [1 + patches, hidden]; row 0 is the class token at its place

    def __init__(self, ops: Ops, patch: Linear, norm: Norm, colours: tuple[Tensor, Tensor]) -> None:
        self.ops, self.patch, self.norm, self.colours = ops, patch, norm, colours

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """([s, hidden] of ``dtype``, what it is added to). int32 positions [s, 2]: the place in the table, and 0."""
        x, place = self.patch(self.ops.patches(pixels, *self.colours, dtype)), position[:, 0]
        x = x * (place != 0).to(dtype)[:, None] + self.ops.gather_rows(self.table, place.long())
        x = self.norm(x)[0]
        return x, self.ops.first_residual(x)


class ClipExit:
    """The end of a VISION launch: the projector, whose rows go to the arena."""

    def __init__(self, ops: Ops, enter: Columns, leave: Rows, act: str) -> None:
        self.ops, self.enter, self.leave, self.act = ops, enter, leave, act

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores tokens in ``arena[rows]``; x and residual are [s, hidden]."""
        self.ops.scatter_rows(arena, rows, self.leave(self.ops.act(self.enter(x + residual), self.act)))


class Llava(Decoder):
    """``core.models.interface.Model`` with images, which the first pipeline stage encodes."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, ClipTower)
        if not self.share.starts:
            return
        tower = held_whole(backend) if config.own_towers else backend
        c, ops, comm = config.vision, backend.ops, tower.comm
        self.tower, self.patch = c, Linear(ops, comm)
        self.first_norm = norm_of(LAYER, ops, c.hidden, c.eps)
        self.blocks = [ViTBlock(tower, c, True, c.eps, c.activation) for _ in range(c.depth)]
        part = (ColumnPart("linear_1", c.out_hidden, 1),)
        self.widen = Columns(ops, comm, c.hidden, part, bias=c.projector_bias)
        self.project = Rows(ops, comm, c.out_hidden, c.out_hidden, bias=c.projector_bias)
        said = any((config.path / name).is_file() for name in FILES)
        seen = spread(read_settings(config.path, c.image) if said else Colours(), c.slot.values // CHANNELS)
        colours = seen[0].to(backend.device), seen[1].to(backend.device)
        self.see = ClipEntry(ops, self.patch, self.first_norm, colours)
        self.tell = ClipExit(ops, self.widen, self.project, c.projector)

    def load_from(self, source: Source) -> None:
        super().load_from(source)
        if not self.share.starts:
            return
        c, at = self.tower, "visual.embeddings"
        stored = (c.hidden, CHANNELS, c.patch, c.patch)
        self.patch.pack(source.take(f"{at}.patch_embedding.weight", stored).reshape(c.hidden, -1), None)
        table = source.take(f"{at}.position_embedding.weight", (c.tokens + 1, c.hidden))
        first = table[:1] + source.take(f"{at}.class_embedding", (c.hidden,))
        self.see.table = torch.cat([first, table[1:]])
        self.first_norm.load(source, "visual.pre_layrnorm")
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        self.widen.load(source, "visual.projector")
        self.project.load(source, "visual.projector.linear_2")

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed tiles and writes their tokens to ``arena[rows]``."""
        ops = self.ops
        x, residual = ops.region(self.see, inputs.pixels, inputs.position, self.backend.dtype)
        segments = ops.prepare_segments(inputs.segments)
        for block in self.blocks:
            x, residual = ops.layer(block, x, residual, None, segments)
            ops.cut("layer")
        ops.by_rows(self.tell, (x, residual, inputs.rows), self.persistent.arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays tiles out one after the other: patches, the class token, padding; the rest of ``slots`` is padding."""
        c = self.tower
        packed = VisionInputs(
            pixels=np.zeros((slots, c.slot.values), np.uint8),
            position=np.zeros((slots, 2), np.int32),
            segment=np.arange(slots // WINDOW_SLOTS, dtype=np.int32),
            count=np.full(slots // WINDOW_SLOTS, WINDOW_SLOTS, np.int32),
            rows=np.full(slots, SINK_ROW, np.int32),
        )
        for i, image in enumerate(images):
            here = slice(i * c.tile, i * c.tile + c.tokens)
            packed.pixels[here] = image.pixels
            packed.position[here, 0] = 1 + np.arange(c.tokens)
            packed.rows[here] = image.rows
            windows = slice(i * c.tile // WINDOW_SLOTS, (i + 1) * c.tile // WINDOW_SLOTS)
            packed.segment[windows] = windows.start
            packed.count[windows.stop - 1] = (c.tokens + 1) - (c.tile - WINDOW_SLOTS)
        return packed

    def nbytes(self) -> int:
        if not self.share.starts:
            return super().nbytes()
        own = (
            self.patch.bytes + self.see.table.nbytes + self.first_norm.nbytes() + self.widen.bytes + self.project.bytes
        )
        return super().nbytes() + own + sum(block.nbytes() for block in self.blocks)


def make(config: ModelConfig, backend: Backend) -> Llava:
    """The factory that the family's record names."""
    return Llava(config, backend)
