"""The tower of Qwen2-VL and Qwen2.5-VL on packed slots: static shapes, patch embedding as a GEMM, merged cells."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Backend, Ops, Rotary, VisionTensors
from trencadis.core.checkpoint.model_config import LAYER, RMS
from trencadis.core.layers.linear import ColumnPart, Columns, Linear, Rows
from trencadis.core.layers.norm import Norm, norm_of
from trencadis.core.layers.rope import vision_frequencies
from trencadis.core.layers.source import Source
from trencadis.multimodal.colours import CLIP, Colours
from trencadis.multimodal.qwen2_vl.config import Qwen25Tower
from trencadis.multimodal.vit_block import ViTBlock, spread

EPS = 1e-6
"""Epsilon of every norm of the tower; no checkpoint states another."""


class TowerEntry:
    """The start of a VISION launch: patches made of pixels, and rotary factors."""

    def __init__(self, ops: Ops, patch: Linear, colours: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor]) -> None:
        self.ops, self.patch, self.colours, self.angles = ops, patch, colours, angles

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Rotary]:
        """([s, hidden] of ``dtype``, what they are added to, rotary factors).

        Pixels are uint8 [s, patch values], positions int32 [s, 2].
        """
        x = self.patch(self.ops.patches(pixels, *self.colours, dtype))
        return x, self.ops.first_residual(x), self.ops.rotary(position.t(), *self.angles)


class TowerExit:
    """The end of a VISION launch: the merger, whose tokens go to the arena."""

    def __init__(self, ops: Ops, norm: Norm, merge_in: Columns, merge_out: Rows) -> None:
        self.ops, self.norm, self.merge_in, self.merge_out = ops, norm, merge_in, merge_out

    def __call__(self, x: Tensor, residual: Tensor | None, rows: Tensor, arena: Tensor) -> None:
        """Stores image tokens in ``arena[rows]``; x is [merge cells, slots of a cell, hidden], as is the residual."""
        added = None if residual is None else residual.flatten(0, 1)
        merged = self.norm(x.flatten(0, 1), added)[0].view(len(rows), -1)
        self.ops.scatter_rows(arena, rows, self.merge_out(self.ops.act(self.merge_in(merged), "gelu")))


class VisionTower:
    """The whole tower: uint8 patches [s, patch values] to image tokens [s / 4, out_hidden] in slot order."""

    def __init__(self, backend: Backend, c: Qwen25Tower, seen: Colours = CLIP) -> None:
        ops, comm = backend.ops, backend.comm
        self.config, self.ops, self.dtype = c, ops, backend.dtype
        self.patch = Linear(ops, comm)
        self.blocks = [ViTBlock(backend, c, i in c.full_layers, EPS, c.activation) for i in range(c.depth)]
        self.norm = norm_of(LAYER if c.layer_norm else RMS, ops, c.hidden, EPS)
        inner = c.hidden * c.merge * c.merge
        self.merge_in = Columns(ops, comm, inner, (ColumnPart("0", inner, 1),), bias=True)
        self.merge_out = Rows(ops, comm, inner, c.out_hidden, bias=True)
        colours = tuple(t.to(backend.device) for t in spread(seen, c.patch_values // c.channels))
        angles = tuple(t.to(backend.device) for t in vision_frequencies(c.hidden // c.heads, c.rope_theta))
        self.enter = TowerEntry(ops, self.patch, (colours[0], colours[1]), (angles[0], angles[1]))
        self.leave = TowerExit(ops, self.norm, self.merge_in, self.merge_out)

    def load(self, source: Source, name: str) -> None:
        c = self.config
        stored = (c.hidden, c.channels, c.temporal, c.patch, c.patch)
        self.patch.pack(source.take(f"{name}.patch_embed.proj.weight", stored).reshape(c.hidden, -1), None)
        for i, block in enumerate(self.blocks):
            block.load(source, f"{name}.blocks.{i}")
        self.norm.load(source, f"{name}.merger.ln_q")
        self.merge_in.load(source, f"{name}.merger.mlp")
        self.merge_out.load(source, f"{name}.merger.mlp.2")

    def __call__(self, inputs: VisionTensors, arena: Tensor) -> None:
        """Writes image tokens, [s / 4, out_hidden] of the backend's dtype, to ``arena[inputs.rows]``."""
        ops = self.ops
        x, residual, rotary = ops.region(self.enter, inputs.pixels, inputs.position, self.dtype)
        segments = ops.prepare_segments(inputs.segments)
        for block in self.blocks:
            x, residual = ops.layer(block, x, residual, rotary, segments)
            ops.cut("layer")
        cells = (len(inputs.rows), -1, x.shape[-1])
        ops.by_rows(self.leave, (x.view(cells), None if residual is None else residual.view(cells), inputs.rows), arena)

    def nbytes(self) -> int:
        parts = [self.patch.bytes, self.norm.nbytes(), self.merge_in.bytes, self.merge_out.bytes]
        return sum(parts) + sum(block.nbytes() for block in self.blocks)
