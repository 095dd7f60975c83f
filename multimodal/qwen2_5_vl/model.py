"""Qwen2.5-VL: Qwen2-VL's model with slots in windows."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.device.backend import Backend
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.step import Encode
from trencadis.multimodal.qwen2_5_vl.window_packing import pack_windows
from trencadis.multimodal.qwen2_vl.model import Qwen2VL


class Qwen25VL(Qwen2VL):
    """``core.models.model_and_ops_api.Model`` with images."""

    def pack(self, images: Sequence[Encode], slots: int) -> VisionInputs:
        """Packs images in windows of 64 slots; the rest of ``slots`` is padding."""
        return pack_windows(images, slots)


def make(config: ModelConfig, backend: Backend) -> Qwen25VL:
    """Builds the model; named in the family's record."""
    return Qwen25VL(config, backend)
