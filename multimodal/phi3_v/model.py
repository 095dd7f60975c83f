"""Phi-3.5-vision: Phi-3's decoder, CLIP's tower on packed slots, and two constant rows that pass the projector."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.backend import Backend
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.layers.source import Source
from trencadis.core.layout import RESERVED_ROWS
from trencadis.core.models.interface import Persistent
from trencadis.multimodal.colours import Colours
from trencadis.multimodal.llava.model import ClipModel
from trencadis.multimodal.phi3_v.family import PLANES
from trencadis.multimodal.phi3_v.fine import OFFSET, STEPS
from trencadis.multimodal.phi3_v.processor import colours_of
from trencadis.multimodal.tiles.model import CellEntry
from trencadis.multimodal.vit_block import spread


class FineEntry(CellEntry):
    """The start of a VISION launch, whose values have three bytes each."""

    def values(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        planes = self.ops.patches(pixels, *self.colours, torch.float32).view(len(pixels), PLANES, -1)
        return (planes[:, 0] + planes[:, 1] + planes[:, 2]).to(dtype)


class CropModel(ClipModel):
    """A decoder with CLIP's tower over tiles, and the rows between them."""

    separators: Tensor  # [2, hidden]

    def __init__(self, config: ModelConfig, backend: Backend, colours: Colours) -> None:
        super().__init__(config, backend, colours)
        if self.share.starts:
            scale, shift = spread(colours, self.tower.patch**2)
            nothing = torch.zeros_like(shift)
            scales = torch.cat([scale * step for step in STEPS])
            shifts = torch.cat([shift - OFFSET * scale, nothing, nothing])
            self.see = FineEntry(
                backend.ops, self.patch, self.first_norm, (scales.to(backend.device), shifts.to(backend.device))
            )

    def load_from(self, source: Source) -> None:
        super().load_from(source)
        if self.share.starts:
            self.separators = self._separators(source)

    def _separators(self, source: Source) -> Tensor:
        """The end of a line and the separator, [2, hidden], as the projector makes them of a cell's values."""
        c, at = self.tower, "visual.projector"
        width = c.cell_width
        line, whole = source.take("visual.sub_GN", (1, 1, 1, width)), source.take("visual.glb_GN", (1, 1, width))
        rows = torch.cat([line.view(1, width), whole.view(1, width)]).float()
        for name, shape in (("linear_1", (c.out_hidden, c.cell_width)), ("linear_2", (c.out_hidden, c.out_hidden))):
            if name == "linear_2":
                rows = functional.gelu(rows)
            packed = source.quantised(f"{at}.{name}", shape, 0, 0, shape[0])
            weight = source.take(f"{at}.{name}.weight", shape) if packed is None else packed.dequantised()
            bias = source.take(f"{at}.{name}.bias", shape[:1])
            rows = functional.linear(rows, weight.float(), bias.float())
        return rows.to(self.backend.dtype)

    def bind(self, persistent: Persistent) -> None:
        super().bind(persistent)
        if self.share.starts:
            persistent.arena[RESERVED_ROWS : RESERVED_ROWS + len(self.separators)] = self.separators

    def nbytes(self) -> int:
        return super().nbytes() + (self.separators.nbytes if self.share.starts else 0)


def make(config: ModelConfig, backend: Backend) -> CropModel:
    """The factory that the family's record names."""
    return CropModel(config, backend, colours_of(config))
