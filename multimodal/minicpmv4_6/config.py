"""Configuration of MiniCPM-V 4.6's tower: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.vision_config import SharedMatrix, SlotForm, VisionLaunchParts
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vit_config import ViTConfig

WINDOW = 4
"""Patches of a window that the tower merges to one row, 2 x 2; and rows that the projector merges to one token."""


SIDE = 4
"""Patches along a side of a cell, whose 16 patches make one token."""


@dataclass(frozen=True)
class MiniCPMVisionConfig(ViTConfig):
    """The tower: layers over patches, a merger of windows, layers over what it leaves, and a projector.

    Args:
        patch: pixels along a side of a patch.
        side: the table of positions has ``side`` x ``side`` entries.
        eps: epsilon of all norms but the projector's; activation: of the layers' MLPs.
        merged_from: layers over patches, those before the merger.
    """

    patch: int
    side: int
    eps: float
    activation: str
    merged_from: int
    rotary: ClassVar[bool] = False
    qkv: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: ClassVar[str] = "self_attn.out_proj"

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * self.patch**2, SIDE**2)

    @property
    def unit(self) -> int:
        """Pixels along a side of a cell."""
        return self.patch * SIDE

    def launch_parts(self, slots: int) -> VisionLaunchParts:
        """Returns the parts of a launch: those of every tower, the merger, and masks and layers behind it."""
        found = super().launch_parts(slots)
        merged = ("merged masks", "merged images") if self.depth > self.merged_from else ()
        return found._replace(whole=(*found.whole, "merger", *merged))

    @property
    def whole(self) -> int:
        return self.depth

    @property
    def window_width(self) -> int:
        """Number of values of a window: those of its patches, concatenated."""
        return WINDOW * self.hidden

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        """Yields nothing: no checkpoint quantises the two mergers."""
        yield from ()

    def _merger_mlp(self) -> int:
        """Counts the matrices of the merger's MLP, which takes whole windows."""
        return WINDOW * self.intermediate * (self.window_width + self.hidden)

    def _merger_weights(self) -> int:
        """Counts the matrices of the merger between the layers: attention within windows, then the MLP."""
        return 4 * self.hidden**2 + self._merger_mlp()

    def _projector_weights(self) -> int:
        return self.window_width**2 + self.window_width * self.out_hidden

    def slot_weights(self) -> float:
        later = self.depth - self.merged_from
        layers = (self.merged_from + later / WINDOW) * self._layer_weights()
        merging = 4 * self.hidden**2 + self._merger_mlp() / WINDOW
        return layers + self.patch_embed_inputs * self.hidden + merging + self._projector_weights() / self.slot.cell

    def count_weights(self) -> int:
        return super().count_weights() + self._merger_weights()

    def other_weights(self, ranks: int) -> int:
        """Counts the table of positions, the norm behind the layers, and both mergers, which every rank holds whole."""
        wide, inner = self.window_width, WINDOW * self.intermediate
        biases = 4 * self.hidden + inner + self.hidden
        norms = self.norm_weights + 2 * wide
        merger = self._merger_weights() + biases + norms
        projector = self._projector_weights() + wide + self.out_hidden + 2 * wide
        return (self.side**2 + 1) * self.hidden + self.norm_weights + merger + projector

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        """Includes the merger: queries, keys and values of all heads, their products in float32, and the MLP's columns
        of a window.
        """
        attending = slots * self.hidden * (6 * itemsize + 16)
        inner = slots * (3 * self.hidden + 3 * self.intermediate) * itemsize
        leaving = slots // WINDOW * (3 * self.hidden + 4 * self.hidden) * itemsize
        return max(super().activations(slots, itemsize, ranks, unit), attending, inner, leaving)

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        return 0
