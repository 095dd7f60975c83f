"""Configuration of Gemma-4's tower, whose rows are means of 3 x 3 patches, and of the 12B model's embedding of patches
of 48 pixels, which has no layers. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.vision_config import SharedMatrix, SlotForm, VisionLaunchParts, VisionRowPart
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vit_config import ViTConfig

MERGE = 3
"""Patches along a side of a cell: the mean of 9 patches is a row."""


@dataclass(frozen=True)
class Gemma4VisionConfig(ViTConfig):
    """Gemma-4's tower: norms around attention and MLP, rotary positions by column and row, means of cells.

    Args:
        patch: pixels along a side of a patch.
        positions: rows of each of the two tables of learned positions.
        theta: base of the rotary frequencies.
        standardise: True if rows are shifted and scaled by stored vectors.
    """

    patch: int
    positions: int
    theta: float
    activation: str
    eps: float
    standardise: bool
    layer_norm: ClassVar[bool] = False
    qkv: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: ClassVar[str] = "self_attn.o_proj"
    mlp_in: ClassVar[tuple[str, ...]] = ("mlp.gate_proj", "mlp.up_proj")

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * self.patch**2, MERGE**2, within_windows=True)

    @property
    def unit(self) -> int:
        """Pixels along a side of a cell."""
        return self.patch * MERGE

    def launch_parts(self, slots: int) -> VisionLaunchParts:
        """Returns the parts of a launch: those of every tower, and what takes cells out of windows."""
        found = super().launch_parts(slots)
        return found._replace(whole=(*found.whole, "cells"))

    @property
    def whole(self) -> int:
        return self.depth

    @property
    def qk_norm(self) -> bool:
        return True

    @property
    def biases(self) -> tuple[bool, bool]:
        return False, False

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        """Yields nothing: no checkpoint quantises the projector."""
        yield from ()

    def _projector_weights(self) -> int:
        return self.hidden * self.out_hidden

    def other_weights(self, ranks: int) -> int:
        """Counts the tables of positions, norms behind attention and MLP, those of values, and the projector with its
        norm and its vectors.
        """
        layers = self.depth * (2 * self.hidden + self.head_dim)
        beside = (2 * self.positions + 1 + 2 * self.standardise) * self.hidden
        return layers + beside + self._projector_weights()

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        """Includes the means, which are computed in float32."""
        leaving = slots * self.hidden * (4 * itemsize + 4)
        return max(super().activations(slots, itemsize, ranks, unit), leaving)

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        return 0


@dataclass(frozen=True)
class PatchEmbedConfig(Gemma4VisionConfig):
    """The 12B model's embedding of patches of 48 pixels: norms, a linear layer, learned positions, a projector."""

    rotary: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        """0: there are no heads."""
        return 0

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * self.patch**2)

    def launch_parts(self, slots: int) -> VisionLaunchParts:
        """Returns the one part of a launch, which runs over patches."""
        return VisionLaunchParts((), (VisionRowPart("patches", slots),))

    @property
    def unit(self) -> int:
        return self.patch

    def other_weights(self, ranks: int) -> int:
        """Counts three layer norms, the bias of the embedding, the tables of positions, and the projector with its
        norm.
        """
        norms = 2 * self.slot.values + 2 * 2 * self.hidden
        return norms + (1 + 2 * self.positions + 1) * self.hidden + self._projector_weights()

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        """Returns the peak bytes: normed patches in the engine's dtype and in float32, then a few rows."""
        return slots * max(self.slot.values * (3 * itemsize + 4), self.hidden * (6 * itemsize + 4))
