"""A model whose pictures are tiles: the tower on packed slots, cell by cell, and the way of its rows to the arena."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.backend import Backend, Ops, Rotary, Segments, VisionTensors
from trencadis.core.checkpoint.model_config import LAYER, ModelConfig
from trencadis.core.layers.apart import held_whole
from trencadis.core.layers.linear import ColumnPart, Columns, Linear, Rows
from trencadis.core.layers.norm import Norm, norm_of
from trencadis.core.layers.source import Source
from trencadis.core.layout import RESERVED_ROWS, SINK_ROW, WINDOW_SLOTS
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.interface import Persistent
from trencadis.core.step import Encode, VisionInputs
from trencadis.multimodal.colours import Colours
from trencadis.multimodal.tiles.config import CHANNELS, TileTower
from trencadis.multimodal.tiles.fine import OFFSET, PLANES, STEPS
from trencadis.multimodal.vit_block import ViTBlock, spread

CELL_EPS = 1e-5
"""Of the norm over a whole cell: torch's default, which no configuration names."""


class CellEntry:
    """The start of a VISION launch: patches and class tokens at their places."""

    table: Tensor  # [1 + patches, hidden]; row 0 is the class token at its place

    def __init__(self, ops: Ops, patch: Linear, norm: Norm | None, colours: tuple[Tensor, Tensor]) -> None:
        self.ops, self.patch, self.norm, self.colours = ops, patch, norm, colours

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """([s, hidden] of ``dtype``, what it is added to). int32 positions [s, 2]: the place in the table, and 0."""
        x, place = self.patch(self.values(pixels, dtype)), position[:, 0]
        x = x * (place != 0).to(dtype)[:, None] + self.ops.gather_rows(self.table, place.long())
        if self.norm is not None:
            x = self.norm(x)[0]
        return x, self.ops.first_residual(x)

    def values(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """[s, values of a patch] of ``dtype``, of a slot's bytes."""
        return self.ops.patches(pixels, *self.colours, dtype)


class FineEntry(CellEntry):
    """The start of a VISION launch whose values have three bytes each (``fine``).

    ``colours``: (scale, shift), float32 [values of a patch].
    """

    def __init__(self, ops: Ops, patch: Linear, norm: Norm | None, colours: tuple[Tensor, Tensor]) -> None:
        scale, shift = colours
        shifts = [shift - OFFSET * scale, torch.zeros_like(shift), torch.zeros_like(shift)]
        super().__init__(ops, patch, norm, (torch.cat([scale * step for step in STEPS]), torch.cat(shifts)))

    def values(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        planes = self.ops.patches(pixels, *self.colours, torch.float32).view(len(pixels), PLANES, -1)
        return (planes[:, 0] + planes[:, 1] + planes[:, 2]).to(dtype)


class ScaledBlock(ViTBlock):
    """A layer that multiplies what its attention and its MLP add, feature by feature."""

    def load(self, source: Source, name: str) -> None:
        super().load(source, name)
        width = (self.names.hidden,)
        self.of_attention, self.of_mlp = (source.take(f"{name}.lambda_{i}", width) for i in (1, 2))

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary | None, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self.norm1(x, residual)
        normed, residual = self.norm2(self.out(self._attended(normed, rotary, segments)) * self.of_attention, residual)
        return self.mlp(normed) * self.of_mlp, residual

    def nbytes(self) -> int:
        return super().nbytes() + self.of_attention.nbytes + self.of_mlp.nbytes


class CellExit:
    """The end of a VISION launch: norms and the projector, whose rows go to the arena."""

    def __init__(self, backend: Backend, c: TileTower) -> None:
        ops, comm, width = backend.ops, backend.comm, c.cell_width
        self.ops, self.hidden, self.act = ops, c.hidden, c.projector
        self.norm = norm_of(LAYER, ops, c.hidden, c.eps) if c.last_norm else None
        self.cell_norm = norm_of(LAYER, ops, width, CELL_EPS) if c.cell_norm else None
        self.bias = c.projector_bias
        self.enter: Linear = Linear(ops, comm)
        self.leave: Rows | None = None
        if c.projector:
            part = (ColumnPart("linear_1", c.out_hidden, 1),)
            self.enter = Columns(ops, comm, width, part, bias=c.projector_bias)
            self.leave = Rows(ops, comm, c.out_hidden, c.out_hidden, bias=c.projector_bias)
        self.shape = c.out_hidden, width

    def load(self, source: Source) -> None:
        at = "visual.projector"
        if self.norm is not None:
            self.norm.load(source, "visual.last_norm")
        if self.cell_norm is not None:
            self.cell_norm.load(source, f"{at}.cell_norm")
        if self.leave is not None and isinstance(self.enter, Columns):
            self.enter.load(source, at)
            self.leave.load(source, f"{at}.linear_2")
            return
        bias = source.take(f"{at}.linear_1.bias", self.shape[:1]) if self.bias else None
        found = source.quantised(f"{at}.linear_1", self.shape, 0, 0, self.shape[0])
        self.enter.pack(source.take(f"{at}.linear_1.weight", self.shape) if found is None else found, bias)

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, arena: Tensor) -> None:
        """Stores tokens in ``arena[rows]``; x and residual are [cells, values of a cell]."""
        shape = x.shape
        if self.norm is not None:
            x = self.norm(x.reshape(-1, self.hidden), residual.reshape(-1, self.hidden))[0].view(shape)
        else:
            x = x + residual
        if self.cell_norm is not None:
            x = self.cell_norm(x)[0]
        x = self.enter(x)
        if self.leave is not None:
            x = self.leave(self.ops.act(x, self.act))
        self.ops.scatter_rows(arena, rows, x)

    def nbytes(self) -> int:
        norms = sum(n.nbytes() for n in (self.norm, self.cell_norm) if n is not None)
        return norms + self.enter.bytes + (0 if self.leave is None else self.leave.bytes)


class TileModel(Decoder):
    """``core.models.interface.VisionModel`` over tiles, which the first pipeline stage encodes.

    ``colours``: how the checkpoint's processor makes values.
    """

    constants: Tensor | None = None

    def __init__(self, config: ModelConfig, backend: Backend, colours: Colours) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, TileTower)
        if not self.share.starts:
            return
        tower = held_whole(backend) if config.own_towers else backend
        c, ops, comm = config.vision, backend.ops, tower.comm
        self.tower, self.patch = c, Linear(ops, comm)
        self.first_norm = norm_of(LAYER, ops, c.hidden, c.eps) if c.first_norm else None
        kind = ScaledBlock if c.layer_scale else ViTBlock
        self.blocks = [kind(tower, c, True, c.eps, c.activation) for _ in range(c.depth)]
        scale, shift = spread(colours, c.embedded // CHANNELS)
        entry = CellEntry if c.planes == 1 else FineEntry
        self.see = entry(ops, self.patch, self.first_norm, (scale.to(backend.device), shift.to(backend.device)))
        self.tell = CellExit(tower, c)

    def load_from(self, source: Source) -> None:
        super().load_from(source)
        if not self.share.starts:
            return
        c, at = self.tower, "visual.embeddings"
        stored = (c.hidden, CHANNELS, c.patch, c.patch)
        self.patch.pack(source.take(f"{at}.patch_embedding.weight", stored).reshape(c.hidden, -1), None)
        self.see.table = self.places(source, at)
        if self.first_norm is not None:
            self.first_norm.load(source, "visual.first_norm")
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}")
        self.tell.load(source)
        if c.constants:
            self.constants = self.constant_rows(source)

    def places(self, source: Source, at: str) -> Tensor:
        """[1 + patches, hidden]: the class token at its place, then what a patch has by its place, biases included.

        Here SigLIP's, which has no class token: zeros stand for it.
        """
        c = self.tower
        table = source.take(f"{at}.position_embedding.weight", (c.side**2, c.hidden))
        table = table + source.take(f"{at}.patch_embedding.bias", (c.hidden,))
        return torch.cat([torch.zeros_like(table[:1]), table])

    def constant_rows(self, source: Source) -> Tensor:
        """[constants, width of an arena row]: what is the same for every picture, for towers with ``constants``."""
        raise NotImplementedError

    def projected(self, source: Source, cells: Tensor) -> Tensor:
        """[n, out_hidden]: what the projector makes of the values of cells, [n, cell_width], in float32."""
        c, at, rows = self.tower, "visual.projector", cells.float()
        assert c.projector == "gelu"
        for name, shape in (("linear_1", (c.out_hidden, c.cell_width)), ("linear_2", (c.out_hidden, c.out_hidden))):
            if name == "linear_2":
                rows = functional.gelu(rows)
            packed = source.quantised(f"{at}.{name}", shape, 0, 0, shape[0])
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
        x, residual = ops.region(self.see, inputs.pixels, inputs.position, self.backend.dtype)
        segments = ops.prepare_segments(inputs.segments)
        for block in self.blocks:
            x, residual = ops.layer(block, x, residual, None, segments)
            ops.cut("layer")
        assert residual is not None  # a tower has a layer at least
        count = len(x) // c.tile

        def cells(t: Tensor) -> Tensor:
            tiles = t[: count * c.tile].view(count, c.tile, c.hidden)[:, : c.side**2]
            return tiles.reshape(count * c.tokens, c.cell_width)

        x, residual = cells(x), cells(residual)
        ops.by_rows(self.tell, (x, residual, inputs.rows[: count * c.tokens]), self.persistent.arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays tiles out one after the other; the rest of ``slots`` is padding. Tile i has rows from i x tokens on."""
        c, patches = self.tower, self.tower.side**2
        packed = VisionInputs(
            pixels=np.zeros((slots, c.slot.values), np.uint8),
            position=np.zeros((slots, 2), np.int32),
            segment=np.arange(slots // WINDOW_SLOTS, dtype=np.int32),
            count=np.full(slots // WINDOW_SLOTS, WINDOW_SLOTS, np.int32),
            rows=np.full(slots // c.slot.cell, SINK_ROW, np.int32),
        )
        for i, image in enumerate(images):
            here = slice(i * c.tile, i * c.tile + patches)
            packed.pixels[here] = image.pixels
            packed.position[here, 0] = 1 + c.places
            packed.rows[i * c.tokens : (i + 1) * c.tokens] = image.rows
            windows = slice(i * c.tile // WINDOW_SLOTS, (i + 1) * c.tile // WINDOW_SLOTS)
            packed.segment[windows] = windows.start
            packed.count[windows.stop - 1] = c.real - (c.tile - WINDOW_SLOTS)
        return packed

    def nbytes(self) -> int:
        if not self.share.starts:
            return super().nbytes()
        own = self.patch.bytes + self.see.table.nbytes + self.tell.nbytes()
        own += 0 if self.first_norm is None else self.first_norm.nbytes()
        own += 0 if self.constants is None else self.constants.nbytes
        return super().nbytes() + own + sum(block.nbytes() for block in self.blocks)
