"""Qwen2-VL: the Qwen2 decoder with M-RoPE (``TextConfig.mrope_section``) and the vision tower."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.backend import Backend, VisionTensors
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.apart import held_whole
from trencadis.core.layers.source import Source
from trencadis.core.models.decoder import Decoder
from trencadis.core.step import Encode, VisionInputs
from trencadis.multimodal.colours import CLIP
from trencadis.multimodal.packing import pack_whole
from trencadis.multimodal.qwen2_vl.config import Qwen25Tower
from trencadis.multimodal.qwen2_vl.preprocessing import read_preprocessing
from trencadis.multimodal.qwen2_vl.tower import VisionTower


class Qwen2VL(Decoder):
    """``core.models.interface.Model`` with images, which the first pipeline stage encodes."""

    tower: VisionTower

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, Qwen25Tower)
        if not self.share.starts:
            return
        read = read_preprocessing(config.path)
        unit = config.aligned(backend.policy.aligned)
        tower = held_whole(backend) if config.own_towers else backend
        self.tower = VisionTower(tower, config.vision, CLIP if read is None else read.colours, unit)

    def load_from(self, source: Source) -> None:
        super().load_from(source)
        if self.share.starts:
            self.tower.load(source, "visual")

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed windows and writes their tokens to ``arena[rows]``."""
        self.tower(inputs, self.persistent.arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Lays images out cell by cell; the rest of ``slots`` is padding."""
        return pack_whole(images, slots, self.tower.config.patch_values, self.tower.config.merge)

    def nbytes(self) -> int:
        return super().nbytes() + (self.tower.nbytes() if self.share.starts else 0)


def make(config: ModelConfig, backend: Backend) -> Qwen2VL:
    """The factory that the family's record names."""
    return Qwen2VL(config, backend)
