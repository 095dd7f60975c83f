"""A decoder that attends to pictures, and its tower: two stacks over all tiles of a picture at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trencadis.core.backend import Backend, Ops, Rotary, Segments, VisionTensors
from trencadis.core.checkpoint.model_config import LAYER, ModelConfig
from trencadis.core.layers.linear import Linear, Rows
from trencadis.core.layers.norm import Norm, norm_of
from trencadis.core.layers.source import Source
from trencadis.core.layout import SINK_ROW, WINDOW_SLOTS, aligned
from trencadis.core.models.crossing import CrossDecoder
from trencadis.core.step import Encode, Int32, VisionInputs
from trencadis.multimodal.colours import Colours
from trencadis.multimodal.stacks.config import TwoStackTower, grids
from trencadis.multimodal.tiles.config import CHANNELS
from trencadis.multimodal.vit_block import ViTBlock, spread

NORM_EPS = 1e-5
"""Of the norms before and behind the first stack: torch's default, which no configuration names."""


class StackEntry:
    """The start of a VISION launch. int32 positions [s, 2]: the tile's row of the tables, and what a slot is.

    That is 0 where it begins as zeros; 1 + place: what the table has there, alone; 1 + places + place: and its pixels.
    """

    table: Tensor  # [tiles of all arrangements x places, hidden]

    def __init__(self, ops: Ops, c: TwoStackTower, patch: Linear, norm: Norm, colours: tuple[Tensor, Tensor]) -> None:
        self.ops, self.patch, self.norm, self.colours, self.places = ops, patch, norm, colours, c.real

    def __call__(self, pixels: Tensor, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """([s, hidden] of ``dtype``, what it is added to)."""
        x, kind = self.patch(self.ops.patches(pixels, *self.colours, dtype)), position[:, 1]
        filled = kind > self.places
        place = (kind - 1 - self.places * filled.int()).clamp(min=0)
        row = (position[:, 0] * self.places + place).long()
        x = x * filled.to(dtype)[:, None] + self.ops.gather_rows(self.table, row)
        x = self.norm(x)[0] * (kind > 0).to(dtype)[:, None]
        return x, self.ops.first_residual(x)


class StackTurn:
    """Between the stacks: a norm, and what a slot has by its tile."""

    table: Tensor  # [tiles of all arrangements, hidden]

    def __init__(self, ops: Ops, norm: Norm) -> None:
        self.ops, self.norm = ops, norm

    def __call__(self, x: Tensor, residual: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.norm(x, residual)[0] + self.ops.gather_rows(self.table, position[:, 0].long())
        return x, self.ops.first_residual(x)


class StackBlock(ViTBlock):
    """A layer; in the second stack what its attention and its MLP add is gated."""

    gates: Tensor | None = None  # [2]: of attention and of the MLP

    def __init__(self, backend: Backend, c: TwoStackTower, gated: bool) -> None:
        super().__init__(backend, c, True, c.eps, c.activation)
        self.out = Rows(backend.ops, backend.comm, c.hidden, c.hidden, unit=c.head_dim)
        self.gated = gated

    def load(self, source: Source, name: str) -> None:
        self.norm1.load(source, f"{name}.input_layernorm")
        self.qkv.load(source, f"{name}.{self.qkv_at}")
        self.out.load(source, f"{name}.{self.names.out}")
        self.norm2.load(source, f"{name}.post_attention_layernorm")
        self.mlp.load(source, f"{name}.mlp")
        if self.gated:
            self.gates = torch.cat([source.take(f"{name}.gate_{part}", (1,)).tanh() for part in ("attn", "ffn")])

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotary: Rotary | None, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        if self.gates is None:
            return super().__call__(x, residual, rotary, segments)
        normed, residual = self.norm1(x, residual)
        normed, residual = self.norm2(self.out(self._attended(normed, rotary, segments)) * self.gates[0], residual)
        return self.mlp(normed) * self.gates[1], residual

    def nbytes(self) -> int:
        return super().nbytes() + (0 if self.gates is None else self.gates.nbytes)


class TwoStackModel(CrossDecoder):
    """``core.models.interface.VisionModel``; ``colours``: how the checkpoint's processor makes values."""

    def __init__(self, config: ModelConfig, backend: Backend, colours: Colours) -> None:
        assert isinstance(config.vision, TwoStackTower)
        c = self.tower = config.vision
        super().__init__(config, backend, c.unit)
        ops = backend.ops
        self.patch, self.project = Linear(ops, backend.comm), Linear(ops, backend.comm)
        self.norms = [norm_of(LAYER, ops, c.hidden, NORM_EPS) for _ in range(2)]
        first = c.depth - c.gated
        self.blocks = [StackBlock(backend, c, i >= first) for i in range(c.depth)]
        scale, shift = (t.to(backend.device) for t in spread(colours, c.embedded // CHANNELS))
        self.see = StackEntry(ops, c, self.patch, self.norms[0], (scale, shift))
        self.turn = StackTurn(ops, self.norms[1])

    def load_from(self, source: Source) -> None:
        super().load_from(source)
        c = self.tower
        stored = (c.hidden, CHANNELS, c.patch, c.patch)
        self.patch.pack(source.take("visual.patch_embedding.weight", stored).reshape(c.hidden, -1), None)
        for norm, name in zip(self.norms, ("pre", "post"), strict=True):
            norm.load(source, f"visual.layernorm_{name}")
        first = c.depth - c.gated
        for i, block in enumerate(self.blocks):
            block.load(source, f"visual.blocks.{i}" if i < first else f"visual.gated.{i - first}")
        self.see.table, self.turn.table = self._places(source), self._tiles(source, "post")
        shape = (c.out_hidden, c.wide)
        weight, taken = source.take("visual.projector.weight", shape), len(c.taken)
        last, between = weight[:, : c.hidden], weight[:, c.hidden :].view(c.out_hidden, c.hidden, taken)
        # The checkpoint's columns behind those of the last output are [feature, output].
        weight = torch.cat([last, between.transpose(1, 2).reshape(c.out_hidden, -1)], dim=1)
        self.project.pack(weight, source.take("visual.projector.bias", shape[:1]))

    def _tiles(self, source: Source, which: str) -> Tensor:
        """[tiles of all arrangements, hidden]: what a tile's slots have; arrangement 0 stands for none."""
        c, at = self.tower, f"visual.{which}_tile_positional_embedding"
        count = len(grids(c.tiles))
        table = source.take(f"{at}.embedding.weight", (count + 1, c.tiles * c.hidden))
        return table[1:].reshape(-1, c.hidden) * source.take(f"{at}.gate", (1,)).tanh()

    def _places(self, source: Source) -> Tensor:
        """[tiles of all arrangements x places, hidden]: all that a slot has by its place, the class token first."""
        c, at = self.tower, "visual.gated_positional_embedding"
        count, places = len(grids(c.tiles)), c.real
        gate = source.take(f"{at}.gate", (1,)).tanh().float()
        own = source.take(f"{at}.embedding", (places, c.hidden)).float() * (1 - gate)
        table = source.take(f"{at}.tile_embedding.weight", (count + 1, c.tiles * places * c.hidden))[1:].float()
        table = table.view(count * c.tiles, places, c.hidden) * gate + own
        table[:, 1:] += self._tiles(source, "pre").float()[:, None]
        table[:, 0] += source.take("visual.class_embedding", (c.hidden,)).float()
        return table.to(self.backend.dtype).view(-1, c.hidden)

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed pictures and writes their keys and values to ``arena[rows]``."""
        ops, c = self.ops, self.tower
        x, residual = ops.region(self.see, inputs.pixels, inputs.position, self.backend.dtype)
        segments, taken = ops.prepare_segments(inputs.segments), {}
        for i, block in enumerate(self.blocks):
            if i == c.depth - c.gated:
                x, residual = ops.region(self.turn, x, residual, inputs.position)
            x, residual = ops.layer(block, x, residual, None, segments)
            assert residual is not None
            if i in c.taken and i < c.depth - c.gated:
                taken[i] = ops.region(stream, x, residual)
            ops.cut("layer")
        rows = (x, residual, inputs.rows, *(taken[i] for i in c.taken))
        ops.by_rows(self.tell, rows, self.persistent.arena)

    def tell(self, x: Tensor, residual: Tensor, rows: Tensor, *rest: Tensor) -> None:
        """Stores slots [s, hidden], with what stands beside them, in ``arena[rows]``; the arena comes last."""
        *taken, arena = rest
        self.keep(self.project(torch.cat([x + residual, *taken], dim=1)), rows, arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays pictures out one after the other, each from a multiple of its slots; the rest is padding."""
        c = self.tower
        windows = slots // WINDOW_SLOTS
        packed = VisionInputs(
            pixels=np.zeros((slots, c.slot.values), np.uint8),
            position=np.zeros((slots, 2), np.int32),
            segment=np.arange(windows, dtype=np.int32),
            count=np.full(windows, WINDOW_SLOTS, np.int32),
            rows=np.full(slots, SINK_ROW, np.int32),
            ghost=np.zeros(windows, np.int32),
        )
        for i, image in enumerate(images):
            self._put(packed, image, i * c.tile)
        return packed

    def _put(self, packed: VisionInputs, image: Encode, at: int) -> None:
        """Puts a picture's real slots from slot ``at`` on, and its ghosts from the next window on."""
        c, side, each = self.tower, self.tower.side, self.tower.real
        high, wide = image.grid[1] // side, image.grid[2] // side
        tiles = high * wide
        first = grids(c.tiles).index((high, wide)) * c.tiles
        real, apart = tiles * each, at + aligned(tiles * each, WINDOW_SLOTS)
        ghosts = c.tiles * (each + c.spare) - real
        place = np.arange(each, dtype=np.int32)
        kinds = np.where(place > 0, 1 + each + place, 1)
        packed.position[at : at + real] = positions(first, tiles, kinds)
        patches = at + np.flatnonzero(np.tile(place > 0, tiles))
        packed.pixels[patches] = image.pixels
        packed.rows[at : at + real] = image.rows[:real]
        empty = (c.tiles - tiles) * each
        packed.position[apart : apart + empty] = positions(first + tiles, c.tiles - tiles, 1 + place)
        packed.rows[apart : apart + empty] = image.rows[real:]
        spare = slice(apart + empty, apart + ghosts)
        packed.position[spare] = positions(first, c.tiles, np.zeros(c.spare, np.int32))
        for start, count, ghost in ((at, real, 0), (apart, ghosts, 1)):
            here = slice(start // WINDOW_SLOTS, (start + aligned(count, WINDOW_SLOTS)) // WINDOW_SLOTS)
            packed.segment[here], packed.ghost[here] = at // WINDOW_SLOTS, ghost  # type: ignore[index]
            packed.count[here.stop - 1] = count - (here.stop - here.start - 1) * WINDOW_SLOTS

    def nbytes(self) -> int:
        own = self.patch.bytes + self.project.bytes + self.see.table.nbytes + self.turn.table.nbytes
        return super().nbytes() + own + sum(part.nbytes() for part in (*self.norms, *self.blocks))


def stream(x: Tensor, residual: Tensor) -> Tensor:
    """[s, hidden]: what the layers so far have made."""
    return x + residual


def positions(first: int, tiles: int, kinds: Int32) -> Int32:
    """int32 [tiles x len(kinds), 2]: the row of each tile from ``first`` on, and what its slots are."""
    row = np.repeat(np.arange(first, first + tiles, dtype=np.int32), len(kinds))
    return np.stack([row, np.tile(kinds, tiles)], axis=1).astype(np.int32)
