"""Configuration of SigLIP2's tower over images of any aspect ratio (NaFlex) and of LFM2-VL's projector. Torch-free.

Resizes a square table of position embeddings to an image's grid of patches (bilinear, antialiased). Pure numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np

from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.step import Encode, Float32, Int32
from trencadis.core.vision_config import SharedMatrix, SlotForm
from trencadis.multimodal.patch_packing import add_positions, join_neighbours, patch_coordinates
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vit_config import ViTConfig


class AxisNeighbours(NamedTuple):
    """Rows of the table along one axis, int32 [patches, near], and their weights, float32 [patches, near]."""

    rows: Int32
    weights: Float32


def find_neighbours(count: int, side: int) -> AxisNeighbours:
    """Returns which entries of a table's axis of ``side`` entries make each of ``count`` positions.

    An axis with fewer positions than the table is averaged over wider triangles, as in an antialiased resize.
    """
    scale = np.float32(side) / np.float32(count)
    support = max(scale, np.float32(1))
    center = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distance = np.abs(np.arange(side, dtype=np.float32) - center[:, None])
    dense = np.clip(1 - distance / support, 0, None).astype(np.float32)
    dense /= dense.sum(-1, keepdims=True)
    near = int((dense > 0).sum(-1).max())
    place = (dense > 0).argmax(-1)[:, None] + np.arange(near)
    rows = np.minimum(place, side - 1)
    weights = np.where(place < side, np.take_along_axis(dense, rows, 1), 0)
    return AxisNeighbours(rows.astype(np.int32), weights.astype(np.float32))


@lru_cache(maxsize=256)
def resized_positions(h: int, w: int, side: int, merge: int) -> tuple[Int32, Float32]:
    """Returns for each patch of a grid its rows of the table, int32 [h x w, 2 x side], and their weights, float32.

    At least one side of the grid must have ``side`` patches: that axis has two neighbours, the other ``side`` at most.
    """
    at = patch_coordinates(h, w, merge)
    rows, columns = find_neighbours(h, side), find_neighbours(w, side)
    near, weights = join_neighbours(
        (rows.rows[at[:, 0]], rows.weights[at[:, 0]]), (columns.rows[at[:, 1]], columns.weights[at[:, 1]]), side
    )
    spare = ((0, 0), (0, 2 * side - near.shape[1]))
    return np.pad(near, spare), np.pad(weights, spare)


def add_resized_positions(packed: VisionInputs, images: Sequence[Encode], side: int, merge: int) -> VisionInputs:
    """Adds to packed images each patch's rows in a table of ``side`` x ``side`` positions and their weights."""
    return add_positions(packed, images, 2 * side, lambda h, w: resized_positions(h, w, side, merge))


@dataclass(frozen=True)
class Lfm2VisionConfig(ViTConfig):
    """SigLIP2's tower, and a projector of whole cells with an inner width of its own.

    Args:
        patch: pixels along a side of a patch; merge: patches along a side of a cell.
        side: the position table has ``side`` x ``side`` entries.
        eps: epsilon of the tower's norms; activation: of its MLPs.
        inner: columns between the projector's two linear layers; projector: the activation between them.
        projector_bias: True if they have biases.
        cell_norm: True if a whole cell is normalised before them.
    """

    patch: int
    merge: int
    side: int
    eps: float
    activation: str
    inner: int
    projector: str
    projector_bias: bool
    cell_norm: bool
    rotary: ClassVar[bool] = False
    qkv: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: ClassVar[str] = "self_attn.o_proj"

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * self.patch**2, self.merge**2, 2 * self.side)

    @property
    def unit(self) -> int:
        """Pixels along a side of a cell."""
        return self.patch * self.merge

    @property
    def cell_width(self) -> int:
        """Number of values of a cell: those of its patches, concatenated."""
        return self.hidden * self.merge**2

    @property
    def whole(self) -> int:
        return self.depth

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        width, inner = self.cell_width, -(-self.inner // ranks)
        yield SharedMatrix("visual.projector.linear_1", inner, width, width)
        yield SharedMatrix("visual.projector.linear_2", self.out_hidden, inner, self.inner)

    def other_weights(self, ranks: int) -> int:
        """Counts the bias of the patches, the position table, the norms behind the layers, and the projector."""
        matrices = sum(m.rows * (m.columns + self.projector_bias) for m in self.projector_matrices(ranks))
        return matrices + self.hidden * (1 + self.side**2 + 2) + self.cell_norm * 2 * self.cell_width

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        """Includes the projector, and the rows of the position table, which are added up in float32."""
        inner = 2 * -(-self.inner // ranks) + self.out_hidden
        leaving = 2 * self.hidden + (3 * self.cell_width + inner) // self.merge**2
        layers = super().activations(slots, itemsize, ranks, unit)
        return max(layers, slots * leaving * itemsize, slots * self.hidden * (3 * itemsize + 16))

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Returns the bytes that the projector's collective keeps."""
        if ranks == 1:
            return 0
        inner = self.cell_width + 2 * -(-self.inner // ranks) if cached else 0
        return slots // self.merge**2 * (inner + self.out_hidden) * itemsize
