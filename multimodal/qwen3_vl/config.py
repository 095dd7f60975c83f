"""Configuration of the DeepStack vision tower: sizes, weight counts and costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.vision_config import SharedMatrix, SlotForm
from trencadis.multimodal.position_interpolation import NEIGHBOURS
from trencadis.multimodal.vit.base_config import ViTConfig

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
