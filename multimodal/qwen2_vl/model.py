"""Qwen2-VL: the Qwen2 decoder with M-RoPE (``TextConfig.mrope_section``) and the vision tower."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source import WeightSource
from trencadis.core.device.backend import Backend, VisionTensors
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.linear import replicate_layers
from trencadis.core.step import Encode, VisionInputs
from trencadis.multimodal.normalisation import CLIP
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.qwen2_vl.config import Qwen25VisionConfig
from trencadis.multimodal.qwen2_vl.preprocessor_config import read_preprocessor_config
from trencadis.multimodal.qwen2_vl.vision_tower import Qwen2VLVisionTower


class Qwen2VL(Decoder):
    """``core.models.interface.Model`` with images, which the first pipeline stage encodes."""

    tower: Qwen2VLVisionTower

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, Qwen25VisionConfig)
        if not self.share.starts:
            return
        read = read_preprocessor_config(config.path)
        unit = config.alignment_unit(backend.policy.aligned)
        tower = replicate_layers(backend) if config.encoder_data_parallel else backend
        self.tower = Qwen2VLVisionTower(tower, config.vision, CLIP if read is None else read.normalisation, unit)

    def load_from(self, source: WeightSource) -> None:
        super().load_from(source)
        if self.share.starts:
            self.tower.load(source, "visual")

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes their tokens to ``arena[rows]``."""
        self.tower(inputs, self.persistent.arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images cell by cell; the rest of ``slots`` is padding."""
        return pack_whole_images(images, slots, self.tower.config.patch_values, self.tower.config.merge)

    def nbytes(self) -> int:
        return super().nbytes() + (self.tower.nbytes() if self.share.starts else 0)


def make(config: ModelConfig, backend: Backend) -> Qwen2VL:
    """Builds the model; named in the family's record."""
    return Qwen2VL(config, backend)
