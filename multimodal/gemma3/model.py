"""Gemma-3 with images: its decoder, SigLIP's tower on packed slots, and means over cells of patches."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Backend
from trencadis.core.models.linear_and_embedding import Linear, TowerLayer
from trencadis.core.models.mlp_and_norms import LayerNorm, RMSNorm
from trencadis.multimodal.gemma3.family import Gemma3VisionConfig
from trencadis.multimodal.gemma3.processor import read_settings
from trencadis.multimodal.pixel_normalisation_and_fixed_point import IMAGENET_STANDARD, PixelNormalisation
from trencadis.multimodal.vit.tile_image_processor import has_processor_settings
from trencadis.multimodal.vit.tile_vision_model import TileVisionModel


class Gemma3Projector:
    """The end of a VISION launch: the last norm, the mean of each cell, the cell's norm and the projector."""

    def __init__(self, backend: Backend, c: Gemma3VisionConfig) -> None:
        self.ops, self.hidden, self.width = backend.ops, c.hidden, c.out_hidden
        self.norm = LayerNorm(self.ops, c.hidden, c.eps)
        self.cell_norm = RMSNorm(self.ops, c.hidden, c.eps, above_one=True)
        self.projection = Linear(self.ops, backend.comm)

    def load(self, source: WeightSource) -> None:
        at = "visual.projector"
        self.norm.load(source, "visual.last_norm")
        self.cell_norm.load(source, f"{at}.mm_soft_emb_norm")
        stored = source.take(f"{at}.mm_input_projection_weight", (self.hidden, self.width))
        self.projection.pack(stored.t().contiguous(), None)

    def list_layers(self) -> Iterator[TowerLayer]:
        """Yields nothing: the projector is a parameter, which no adapter is trained for."""
        yield from ()

    def __call__(self, x: Tensor, residual: Tensor, rows: Tensor, adapters: AdapterRows | None, arena: Tensor) -> None:
        """Stores the projected means in ``arena[rows]``; x and residual are [cells, values of a cell].

        ``adapters``: those of the cells, which change nothing here.
        """
        slots = self.norm(x.reshape(-1, self.hidden), residual.reshape(-1, self.hidden))[0]
        mean = slots.view(len(rows), -1, self.hidden).float().mean(1).to(slots.dtype)
        self.ops.scatter_rows(arena, rows, self.projection(self.cell_norm(mean)[0]))

    def nbytes(self) -> int:
        """Returns the bytes without the cells' norm, which is float32 on every device and counted by
        ``Gemma3VisionConfig.tables``.
        """
        return self.norm.nbytes() + self.projection.bytes


class Gemma3VLModel(TileVisionModel):
    """Gemma-3 with its vision tower, a ``core.models.model_and_ops_api.VisionModel``."""

    def __init__(self, config: ModelConfig, backend: Backend, normalisation: PixelNormalisation) -> None:
        super().__init__(config, backend, normalisation)
        assert isinstance(config.vision, Gemma3VisionConfig)
        self.projector = Gemma3Projector(backend, config.vision)  # type: ignore[assignment]


def make(config: ModelConfig, backend: Backend) -> Gemma3VLModel:
    """Builds the model; named in the family's record."""
    assert isinstance(config.vision, Gemma3VisionConfig)
    known = has_processor_settings(config.path)
    return Gemma3VLModel(config, backend, read_settings(config.path, config.vision) if known else IMAGENET_STANDARD)
