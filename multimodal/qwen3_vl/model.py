"""Qwen3-VL: the Qwen3 decoder with positions on three axes that take turns, and the tower."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.backend import Backend, VisionTensors
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.core.models.decoder import Decoder
from trencadis.core.step import Encode, VisionInputs
from trencadis.multimodal.colours import Colours
from trencadis.multimodal.qwen2_vl.preprocessing import read_preprocessing
from trencadis.multimodal.qwen3_vl.config import PATCH, Qwen3Tower
from trencadis.multimodal.qwen3_vl.packing import pack_mixed
from trencadis.multimodal.qwen3_vl.tower import MixedTower

HALF = (0.5, 0.5, 0.5)


class Qwen3VL(Decoder):
    """``core.models.interface.Model`` with images."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, Qwen3Tower)
        read = read_preprocessing(config.path, patch=PATCH)
        seen = Colours(HALF, HALF) if read is None else read.colours
        self.seeing = config.vision
        self.tower = MixedTower(backend, config.vision, seen, config.aligned(backend.policy.aligned))

    def load_from(self, source: Source) -> None:
        super().load_from(source)
        self.tower.load(source, "visual")

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes the parts of their rows to the arena."""
        self.tower(inputs, self.persistent.arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays images out cell by cell; the rest of ``slots`` is padding."""
        return pack_mixed(images, slots, self.seeing.side)

    def nbytes(self) -> int:
        return super().nbytes() + self.tower.nbytes()


def make(config: ModelConfig, backend: Backend) -> Qwen3VL:
    """The factory that the family's records name."""
    return Qwen3VL(config, backend)
