"""Configuration of a tower over tiles: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from trencadis.core.buckets import align_up
from trencadis.core.vision_config import WINDOW_SLOTS, SharedMatrix, SlotForm, VisionLaunchParts, VisionRowPart
from trencadis.multimodal.vit.vit_config import ViTConfig

CHANNELS = 3


@dataclass(frozen=True)
class TileVisionConfig(ViTConfig):
    """Configuration of a vision transformer over tiles of one size, and of the projector that turns merge cells of
    patches into rows.

    A tile's slots are its patches, cell by cell, then the class token, which has no row.

    Args:
        image: pixels along a side of a tile.
        patch: pixels along a side of a patch.
        eps: epsilon of the layers' norms; activation: of their MLPs.
        merge: patches along a side of a cell.
        projector: activation between the projector's two linear layers; "": it is one linear layer.
        projector_bias: True if those have biases.
        qkv_bias: True if queries, keys and values have biases.

    ``class_token``: a tile has a class token. ``first_norm``: patches are normalised before the layers; ``last_norm``:
        after them; ``cell_norm``: a whole cell is normalised before the projector. ``layer_scale``: the outputs of
        attention and MLP are multiplied feature by feature.
    """

    image: int
    patch: int
    eps: float
    activation: str
    merge: int = 1
    projector: str = "gelu"
    projector_bias: bool = True
    qkv_bias: bool = True
    rotary: ClassVar[bool] = False
    class_token: ClassVar[bool] = True
    first_norm: ClassVar[bool] = False
    last_norm: ClassVar[bool] = False
    cell_norm: ClassVar[bool] = False
    layer_scale: ClassVar[bool] = False
    qkv: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: ClassVar[str] = "self_attn.out_proj"

    @property
    def side(self) -> int:
        """Patches along a side of a tile."""
        return self.image // self.patch

    @property
    def rows_per_tile(self) -> int:
        """Arena rows of a tile: the number of its cells."""
        return (self.side // self.merge) ** 2

    @property
    def real_slots(self) -> int:
        """Slots of a tile that are not padding."""
        return self.side**2 + self.class_token

    @property
    def slots_per_tile(self) -> int:
        """VISION slots of a tile, padding included."""
        return align_up(self.real_slots, WINDOW_SLOTS)

    @property
    def max_tiles(self) -> int:
        """Number of tiles of the largest image."""
        return 1

    @cached_property
    def patch_positions(self) -> npt.NDArray[np.int32]:
        """Row-major position of each patch in the order of the slots, int32 [patches]."""
        cells = self.side // self.merge
        grid = np.arange(self.side**2, dtype=np.int32).reshape(cells, self.merge, cells, self.merge)
        return grid.transpose(0, 2, 1, 3).reshape(-1)

    def launch_parts(self, slots: int) -> VisionLaunchParts:
        """Returns the parts of a launch, whose projector runs over whole tiles alone."""
        rows = slots // self.slots_per_tile * self.rows_per_tile
        return super().launch_parts(slots)._replace(by_rows=(VisionRowPart("projector", rows),))

    @property
    def slot(self) -> SlotForm:
        return SlotForm(self.bytes_per_value * CHANNELS * self.patch**2, self.merge**2)

    @property
    def cell_width(self) -> int:
        """Number of values of a cell: those of its patches, concatenated."""
        return self.hidden * self.merge**2

    @property
    def whole(self) -> int:
        return self.depth

    @property
    def biases(self) -> tuple[bool, bool]:
        return self.qkv_bias, True

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        width = self.cell_width
        if not self.projector:
            yield SharedMatrix("visual.projector.linear_1", self.out_hidden, width, width)
            return
        inner = -(-self.out_hidden // ranks)
        yield SharedMatrix("visual.projector.linear_1", inner, width, width)
        yield SharedMatrix("visual.projector.linear_2", self.out_hidden, inner, self.out_hidden)

    def other_weights(self, ranks: int) -> int:
        """Returns the number of weights in the position table (whose first row is the class token's embedding),
        norms, constants and projector.
        """
        matrices = list(self.projector_matrices(ranks))
        total = sum(m.rows * m.columns + m.rows * self.projector_bias for m in matrices)
        total += (self.side**2 + 1) * self.hidden + (self.first_norm + self.last_norm) * self.norm_weights
        total += self.cell_norm * 2 * self.cell_width + self.constants * self.out_hidden
        return total + self.layer_scale * 2 * self.hidden * self.depth

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        inner = -(-self.out_hidden // ranks) if self.projector else 0
        leaving = (2 + self.last_norm + self.cell_norm) * self.cell_width + 2 * inner + self.out_hidden
        layers = super().activations(slots, itemsize, ranks, unit)
        if self.bytes_per_value > 1:  # a patch's bytes become float32 before they are added
            layers = max(layers, slots * (4 * (self.bytes_per_value + 2) + itemsize) * self._patch_embed_columns(unit))
        return max(layers, slots * itemsize * (2 * self.hidden + leaving // self.merge**2))

    @property
    def cut_widths(self) -> int:
        """Widths that cross a collective's cut: with layer scale, one more for the product."""
        return super().cut_widths + self.layer_scale

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Returns the bytes that the projector's collective keeps."""
        if ranks == 1 or not self.projector:
            return 0
        inner = self.cell_width + 2 * -(-self.out_hidden // ranks) if cached else 0
        return slots // self.merge**2 * (inner + self.out_hidden) * itemsize


@dataclass(frozen=True)
class SiglipVisionConfig(TileVisionConfig):
    """SigLIP's tower: no class token, a norm after the layers."""

    class_token: ClassVar[bool] = False
    last_norm: ClassVar[bool] = True
