"""Qwen3-VL: the Qwen3 decoder with interleaved positions on three axes, and the DeepStack tower."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source import WeightSource
from trencadis.core.device.backend import Backend, VisionTensors
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.linear import replicate_layers
from trencadis.core.step import Encode, VisionInputs
from trencadis.multimodal.normalisation import IMAGENET_STANDARD
from trencadis.multimodal.patch_packing import pack_whole_images
from trencadis.multimodal.qwen2_vl.preprocessor_config import read_preprocessor_config
from trencadis.multimodal.qwen3_vl.config import DeepStackVisionConfig, add_interpolated_positions
from trencadis.multimodal.qwen3_vl.deepstack_tower import DeepStackTower


class Qwen3VL(Decoder):
    """``core.models.interface.Model`` with images."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend)
        assert isinstance(config.vision, DeepStackVisionConfig)
        read = read_preprocessor_config(config.path, patch=config.vision.patch)
        normalisation = IMAGENET_STANDARD if read is None else read.normalisation
        self.vision_config = config.vision
        tower = replicate_layers(backend) if config.encoder_data_parallel else backend
        self.tower = DeepStackTower(tower, config.vision, normalisation, config.alignment_unit(backend.policy.aligned))

    def load_from(self, source: WeightSource) -> None:
        super().load_from(source)
        self.tower.load(source, "visual")

    def vision(self, inputs: VisionTensors) -> None:
        """Encodes packed images and writes the parts of their rows to the arena."""
        self.tower(inputs, self.persistent.arena)

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images cell by cell; the rest of ``slots`` is padding."""
        c = self.vision_config
        return add_interpolated_positions(
            pack_whole_images(images, slots, c.slot.values, c.merge), images, c.side, c.merge
        )

    def nbytes(self) -> int:
        return super().nbytes() + self.tower.nbytes()


def make(config: ModelConfig, backend: Backend) -> Qwen3VL:
    """Builds the model; named in the families' records."""
    return Qwen3VL(config, backend)
