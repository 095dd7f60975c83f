"""Decoder with a vision tower beside it, which the first pipeline stage loads and runs."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trencadis.core.checkpoint.weight_source import WeightSource
from trencadis.core.device.backend import VisionTensors
from trencadis.core.models.decoder import Decoder


class Tower(Protocol):
    """Vision tower whose images have no adapters."""

    def load(self, source: WeightSource) -> None: ...

    def __call__(self, inputs: VisionTensors, arena: Tensor) -> None:
        """Encodes packed images and writes their rows to ``arena[inputs.rows]``."""

    def nbytes(self) -> int: ...


class TowerDecoder(Decoder):
    """Decoder of a model with images; a subclass sets ``tower`` where ``share.starts``, and packs images."""

    tower: Tower

    def load_from(self, source: WeightSource) -> None:
        super().load_from(source)
        if self.share.starts:
            self.tower.load(source)

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes their rows to ``arena[rows]``."""
        self.tower(inputs, self.persistent.arena)

    def nbytes(self) -> int:
        return super().nbytes() + (self.tower.nbytes() if self.share.starts else 0)
