"""The tower on packed slots: interpolated positions, and a part of each row from some of its layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.backend import Backend, Ops, Rotary, VisionTensors
from trencadis.core.layers.linear import ColumnPart, Columns, Linear, Rows
from trencadis.core.layers.norm import LayerNorm
from trencadis.core.layers.rope import vision_frequencies
from trencadis.core.layers.source import Source
from trencadis.core.layout import aligned
from trencadis.multimodal.colours import Colours
from trencadis.multimodal.deep.config import CHANNELS, FRAMES, DeepTower
from trencadis.multimodal.vit_block import ViTBlock, spread

EPS = 1e-6
"""Epsilon of every norm of the tower; no checkpoint states another."""


class MixedEntry:
    """The start of a VISION launch: patches at their places of the table, rotary factors, rows of the parts."""

    table: Tensor  # [side x side, hidden]

    def __init__(
        self, ops: Ops, patch: Linear, colours: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], parts: int
    ) -> None:
        self.ops, self.patch, self.colours, self.angles, self.parts = ops, patch, colours, angles, parts

    def __call__(
        self, pixels: Tensor, position: Tensor, near: Tensor, share: Tensor, rows: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None, Rotary, tuple[Tensor, ...]]:
        """([s, hidden] of ``dtype``, what they are added to, rotary factors, int64 [s / 4] arena rows of each part).

        The arguments are ``VisionTensors``'s.
        """
        ops = self.ops
        x = self.patch(ops.patches(pixels, *self.colours, dtype)) + ops.interpolate(self.table, near, share)
        parts = tuple(rows * self.parts + part for part in range(self.parts))
        return x, ops.first_residual(x), ops.rotary(position.t(), *self.angles), parts


class Merger:
    """One part of the rows, of the output of one layer: a norm of each patch, or of each cell, and two linears."""

    def __init__(self, backend: Backend, c: DeepTower, whole: bool) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.whole = ops, whole
        self.norm = LayerNorm(ops, c.merged if whole else c.hidden, EPS)
        self.enter = Columns(ops, comm, c.merged, (ColumnPart("linear_fc1", c.merged, 1),), bias=True)
        self.leave = Rows(ops, comm, c.merged, c.out_hidden, bias=True)

    def load(self, source: Source, name: str) -> None:
        self.norm.load(source, f"{name}.norm")
        self.enter.load(source, name)
        self.leave.load(source, f"{name}.linear_fc2")

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores [cells, out_hidden] in ``arena[rows]``; x and residual are [cells, slots of a cell, hidden].

        The sum is a tensor of its own: a norm may keep its sum in x, and later layers read that.
        """
        wide = (len(rows), -1) if self.whole else (-1, x.shape[-1])
        normed = self.norm((x + residual).view(wide))[0].view(len(rows), -1)
        self.ops.scatter_rows(arena, rows, self.leave(self.ops.act(self.enter(normed), "gelu")))

    def nbytes(self) -> int:
        return self.norm.nbytes() + self.enter.bytes + self.leave.bytes


class MixedTower:
    """The whole tower: uint8 patches to rows of cells in slot order. ``unit``: as in ``ViTBlock``."""

    def __init__(self, backend: Backend, c: DeepTower, seen: Colours, unit: int = 1) -> None:
        ops, comm = backend.ops, backend.comm
        self.config, self.ops, self.dtype = c, ops, backend.dtype
        self.patch = Linear(ops, comm)
        self.blocks = [ViTBlock(backend, c, True, EPS, c.activation, unit) for _ in range(c.depth)]
        self.mergers = [Merger(backend, c, whole=part > 0) for part in range(1 + c.deep)]
        self.missing = aligned(c.slot.values, unit) - c.slot.values
        wide = (functional.pad(t, (0, self.missing)) for t in spread(seen, c.slot.values // CHANNELS))
        colours = tuple(t.to(backend.device) for t in wide)
        angles = tuple(t.to(backend.device) for t in vision_frequencies(c.head_dim, c.rope_theta))
        self.see = MixedEntry(ops, self.patch, (colours[0], colours[1]), (angles[0], angles[1]), 1 + c.deep)

    def load(self, source: Source, name: str) -> None:
        c = self.config
        stored = (c.hidden, CHANNELS, FRAMES, c.patch, c.patch)
        patch = source.take(f"{name}.patch_embed.proj.weight", stored).reshape(c.hidden, -1)
        bias = source.take(f"{name}.patch_embed.proj.bias", (c.hidden,))
        self.patch.pack(functional.pad(patch, (0, self.missing)) if self.missing else patch, bias)
        self.see.table = source.take(f"{name}.pos_embed.weight", (c.side**2, c.hidden))
        for i, block in enumerate(self.blocks):
            block.load(source, f"{name}.blocks.{i}")
        for merger, at in zip(self.mergers, c.mergers, strict=True):
            merger.load(source, at)

    def __call__(self, inputs: VisionTensors, arena: Tensor) -> None:
        """Writes every part of ``inputs.rows``, [out_hidden] of the backend's dtype each, to the arena."""
        ops, i = self.ops, inputs
        assert i.near is not None and i.share is not None
        x, residual, rotary, rows = ops.region(self.see, i.pixels, i.position, i.near, i.share, i.rows, self.dtype)
        segments = ops.prepare_segments(i.segments)
        cells = (len(i.rows), -1, x.shape[-1])
        for number, block in enumerate(self.blocks):
            x, residual = ops.layer(block, x, residual, rotary, segments)
            if number in self.config.deep_layers:
                part = 1 + self.config.deep_layers.index(number)
                ops.by_rows(self.mergers[part], (x.view(cells), residual.view(cells), rows[part]), arena)
            ops.cut("layer")
        assert residual is not None  # a tower has layers
        ops.by_rows(self.mergers[0], (x.view(cells), residual.view(cells), rows[0]), arena)

    def nbytes(self) -> int:
        own = self.patch.bytes + self.see.table.nbytes + sum(merger.nbytes() for merger in self.mergers)
        return own + sum(block.nbytes() for block in self.blocks)
