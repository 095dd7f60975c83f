"""A tower with a table of places and rows of parts as the engine's plans see it: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.vision_config import SharedMatrix, SlotForm
from trencadis.multimodal.near import NEAR
from trencadis.multimodal.vit import ViTConfig

CHANNELS, FRAMES = 3, 2
"""Colours and frames of a patch."""


@dataclass(frozen=True)
class DeepTower(ViTConfig):
    """Layer norms, plain MLPs, whole images in every layer; a cell's row has parts.

    Args:
        side: the square table has ``side`` x ``side`` positions.
        deep_layers: layers whose output is a part of each row, behind that of the last layer's.
        activation: of the layers' MLPs.
        rope_theta: of the rotary frequencies.
        patch: pixels along a side of a patch.
        merge: patches along a side of a cell.
    """

    side: int
    deep_layers: tuple[int, ...]
    activation: str
    rope_theta: float
    patch: int
    merge: int
    filled: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("mlp.up_proj",)

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * FRAMES * self.patch**2, self.merge**2, NEAR)

    @property
    def whole(self) -> int:
        return self.depth

    @property
    def deep(self) -> int:
        return len(self.deep_layers)

    @property
    def merged(self) -> int:
        """Values of the hidden rows of a cell."""
        return self.hidden * self.merge**2

    @property
    def mergers(self) -> tuple[str, ...]:
        """Names of what makes each part of a row."""
        return ("visual.merger", *(f"visual.deepstack_merger_list.{i}" for i in range(self.deep)))

    def exit_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        inner = -(-self.merged // ranks)
        for name in self.mergers:
            yield SharedMatrix(f"{name}.linear_fc1", inner, self.merged, self.merged)
            yield SharedMatrix(f"{name}.linear_fc2", self.out_hidden, inner, self.merged)

    def beside(self, ranks: int) -> int:
        """The bias of the patches, the table, and of each merger a norm (of a patch, or of a cell) and two linears."""
        inner = -(-self.merged // ranks)
        linears = self.merged * inner + inner + inner * self.out_hidden + self.out_hidden
        norms = self.norm + self.deep * 2 * self.merged
        return self.hidden + self.side**2 * self.hidden + norms + (1 + self.deep) * linears

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """The mergers' collectives."""
        if ranks == 1:
            return 0
        cells = slots // self.merge**2
        operands = slots * self.hidden + cells * -(-self.merged // ranks) if cached else 0
        return (1 + self.deep) * (operands + cells * self.out_hidden) * itemsize
