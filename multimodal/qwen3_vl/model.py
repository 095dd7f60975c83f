"""Qwen3-VL: the Qwen3 decoder with positions on three axes that take turns, and the tower."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.backend import Backend, VisionTensors
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.apart import held_whole
from trencadis.core.layers.source import Source
from trencadis.core.models.decoder import Decoder
from trencadis.core.step import Encode, VisionInputs
from trencadis.multimodal.colours import HALF
from trencadis.multimodal.deep.config import DeepTower
from trencadis.multimodal.deep.tower import MixedTower
from trencadis.multimodal.near import placed
from trencadis.multimodal.packing import pack_whole
from trencadis.multimodal.qwen2_vl.preprocessing import read_preprocessing


class Qwen3VL(Decoder):
    """``core.models.interface.Model`` with images."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, DeepTower)
        read = read_preprocessing(config.path, patch=config.vision.patch)
        seen = HALF if read is None else read.colours
        self.seeing = config.vision
        tower = held_whole(backend) if config.own_towers else backend
        self.tower = MixedTower(tower, config.vision, seen, config.aligned(backend.policy.aligned))

    def load_from(self, source: Source) -> None:
        super().load_from(source)
        self.tower.load(source, "visual")

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes the parts of their rows to the arena."""
        self.tower(inputs, self.persistent.arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays images out cell by cell; the rest of ``slots`` is padding."""
        c = self.seeing
        return placed(pack_whole(images, slots, c.slot.values, c.merge), images, c.side, c.merge)

    def nbytes(self) -> int:
        return super().nbytes() + self.tower.nbytes()


def make(config: ModelConfig, backend: Backend) -> Qwen3VL:
    """The factory that the family's records name."""
    return Qwen3VL(config, backend)
