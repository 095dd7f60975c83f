"""Configuration of the DeepStack vision tower: sizes, weight counts and costs. Torch-free.

Interpolates a square table of position embeddings to an image's patch grid (bilinear). Pure numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.step import Encode, Float32, Int32
from trencadis.core.vision_config import SharedMatrix, SlotForm, VisionLaunchParts, VisionRowPart
from trencadis.multimodal.patch_packing import add_positions, join_neighbours, patch_coordinates
from trencadis.multimodal.vit.vit_config import ViTConfig

NEIGHBOURS = 4
"""Rows of the table between which a position lies."""


def interpolate_axis(position: Int32, count: int, side: int) -> tuple[Int32, Float32]:
    """Returns the two neighbouring table positions, int32 [n, 2], and their weights, float32 [n, 2], of ``count``
    positions along one axis.

    The first and the last position are those of the table. All in float32, as in the reference: a wider type would give
    other weights.
    """
    exact = position.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    floor = np.floor(exact)
    both = np.minimum(floor.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), side - 1)
    distance = np.abs((exact[:, None] - floor[:, None]) - np.arange(2, dtype=np.float32))
    return both, np.maximum(np.float32(1) - distance, np.float32(0))


@lru_cache(maxsize=256)
def interpolated_positions(h: int, w: int, side: int, merge: int) -> tuple[Int32, Float32]:
    """Returns for each patch of a grid the four neighbouring rows of the table, int32 [h x w, 4], and their weights,
    float32 [h x w, 4].
    """
    coordinates = patch_coordinates(h, w, merge)
    rows, columns = interpolate_axis(coordinates[:, 0], h, side), interpolate_axis(coordinates[:, 1], w, side)
    return join_neighbours(rows, columns, side)


def add_interpolated_positions(packed: VisionInputs, images: Sequence[Encode], side: int, merge: int) -> VisionInputs:
    """Adds to packed images each patch's neighbours in a table of ``side`` x ``side`` positions and their weights."""
    return add_positions(packed, images, NEIGHBOURS, lambda h, w: interpolated_positions(h, w, side, merge))


CHANNELS, FRAMES = 3, 2
"""Number of colour channels and of frames of a patch."""


@dataclass(frozen=True)
class DeepStackVisionConfig(ViTConfig):
    """Vision transformer with layer norms, plain MLPs and full attention; each merge cell yields one row per DeepStack
    level.

    Args:
        side: the position table has ``side`` x ``side`` entries.
        deepstack_layers: layers whose outputs form additional parts of each row, after the last layer's.
        activation: activation of the layers' MLPs.
        rope_theta: base of the rotary frequencies.
        patch: pixels along a side of a patch.
        merge: patches along a side of a cell.
    """

    side: int
    deepstack_layers: tuple[int, ...]
    activation: str
    rope_theta: float
    patch: int
    merge: int
    pads_to_unit: ClassVar[bool] = True
    mlp_in: ClassVar[tuple[str, ...]] = ("mlp.up_proj",)

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * FRAMES * self.patch**2, self.merge**2, NEIGHBOURS)

    @property
    def whole(self) -> int:
        return self.depth

    def launch_parts(self, slots: int) -> VisionLaunchParts:
        """Returns the parts of a launch, in which each DeepStack level has a merger."""
        levels = ("projector", *("DeepStack projector" for _ in self.deepstack_layers))
        by_rows = (VisionRowPart(name, self.slot.cells(slots), computed=True) for name in levels)
        return super().launch_parts(slots)._replace(by_rows=tuple(by_rows))

    @property
    def deepstack(self) -> int:
        return len(self.deepstack_layers)

    @property
    def merged_width(self) -> int:
        """Width of the concatenated hidden states of a cell."""
        return self.hidden * self.merge**2

    @property
    def merger_names(self) -> tuple[str, ...]:
        """Canonical names of the patch mergers: the main one, then one per DeepStack layer."""
        return ("visual.merger", *(f"visual.deepstack_merger_list.{i}" for i in range(self.deepstack)))

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        inner = -(-self.merged_width // ranks)
        for name in self.merger_names:
            yield SharedMatrix(f"{name}.linear_fc1", inner, self.merged_width, self.merged_width)
            yield SharedMatrix(f"{name}.linear_fc2", self.out_hidden, inner, self.merged_width)

    def other_weights(self, ranks: int) -> int:
        """Counts the patch bias, the position table, and for each merger a norm (per patch, or per cell) and two
        linear layers.
        """
        inner = -(-self.merged_width // ranks)
        linears = self.merged_width * inner + inner + inner * self.out_hidden + self.out_hidden
        norms = self.norm_weights + self.deepstack * 2 * self.merged_width
        return self.hidden + self.side**2 * self.hidden + norms + (1 + self.deepstack) * linears

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Counts the tensors kept at the mergers' collectives."""
        if ranks == 1:
            return 0
        cells = slots // self.merge**2
        operands = slots * self.hidden + cells * -(-self.merged_width // ranks) if cached else 0
        return (1 + self.deepstack) * (operands + cells * self.out_hidden) * itemsize
