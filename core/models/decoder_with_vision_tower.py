"""Decoder with a vision tower beside it, which the first pipeline stage loads and runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Backend, VisionTensors
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.linear_and_embedding import NO_ADAPTERS, ImageAdapters, TowerLayer, replicate_layers


class Tower(Protocol):
    """Vision tower whose images have no adapters."""

    def load(self, source: WeightSource) -> None: ...

    def __call__(self, inputs: VisionTensors, arena: Tensor) -> None:
        """Encodes packed images and writes their rows to ``arena[inputs.rows]``."""

    def nbytes(self) -> int: ...


class AdaptedTower(Tower, Protocol):
    """Vision tower whose images may have adapters."""

    def __call__(self, inputs: VisionTensors, arena: Tensor, adapters: ImageAdapters = NO_ADAPTERS) -> None:
        """Encodes packed images and writes their rows to ``arena[inputs.rows]``."""

    def list_layers(self) -> Iterator[TowerLayer]:
        """Yields the matrices that take adapters."""
        ...


class TowerDecoder(Decoder):
    """Decoder of a model with images; a subclass sets ``tower`` where ``share.starts``, and packs images."""

    tower: Tower

    @property
    def tower_backend(self) -> Backend:
        """The backend of the tower's layers, which every rank may hold whole."""
        return replicate_layers(self.backend) if self.config.encoder_data_parallel else self.backend

    def load_from(self, source: WeightSource) -> None:
        super().load_from(source)
        if self.share.starts:
            self.tower.load(source)

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes their rows to ``arena[rows]``."""
        self.tower(inputs, self.persistent.arena)

    def nbytes(self) -> int:
        return super().nbytes() + (self.tower.nbytes() if self.share.starts else 0)


class AdaptedTowerDecoder(TowerDecoder):
    """``TowerDecoder`` whose images may have adapters."""

    tower: AdaptedTower

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes their rows, or all parts of them, to the arena."""
        self.tower(inputs, self.persistent.arena, self.prepare_image_adapters(inputs))

    def list_tower_layers(self) -> Iterator[TowerLayer]:
        if self.share.starts:
            yield from self.tower.list_layers()
