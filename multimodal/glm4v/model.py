"""GLM-4.1V: GLM-4's decoder with positions on three axes, and the tower."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source import WeightSource
from trencadis.core.device.backend import Backend, VisionTensors
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.linear import replicate_layers
from trencadis.core.step import Encode, VisionInputs
from trencadis.multimodal.glm4v.config import RULES, Glm4vVisionConfig, add_sampled_positions
from trencadis.multimodal.glm4v.tower import Glm4vTower
from trencadis.multimodal.normalisation import CLIP
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.qwen2_vl.preprocessor_config import read_preprocessor_config


class Glm4v(Decoder):
    """``core.models.interface.Model`` with images, which the first pipeline stage encodes."""

    tower: Glm4vTower

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, Glm4vVisionConfig)
        self.vision_config = config.vision
        if not self.share.starts:
            return
        read = read_preprocessor_config(config.path, patch=config.vision.patch, rules=RULES)
        tower = replicate_layers(backend) if config.encoder_data_parallel else backend
        self.tower = Glm4vTower(tower, config.vision, CLIP if read is None else read.normalisation)

    def load_from(self, source: WeightSource) -> None:
        super().load_from(source)
        if self.share.starts:
            self.tower.load(source, "visual")

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes their tokens to ``arena[rows]``."""
        self.tower(inputs, self.persistent.arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images cell by cell; the rest of ``slots`` is padding."""
        c = self.vision_config
        packed = pack_whole_images(images, slots, c.slot.values, c.merge)
        return add_sampled_positions(packed, images, c.side, c.merge) if c.side else packed

    def nbytes(self) -> int:
        return super().nbytes() + (self.tower.nbytes() if self.share.starts else 0)


def make(config: ModelConfig, backend: Backend) -> Glm4v:
    """Builds the model; named in the families' records."""
    return Glm4v(config, backend)
