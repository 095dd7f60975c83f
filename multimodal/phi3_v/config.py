"""Configuration of Phi-3.5-vision's CLIP tower over tiles. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trencadis.multimodal.llava.config import ClipVisionConfig
from trencadis.multimodal.normalisation import PLANES

NEWLINE, SEPARATOR = range(2)
"""Constant rows: the first follows each line of cells, the second separates an image's tiles from the whole image."""


@dataclass(frozen=True)
class Phi3VVisionConfig(ClipVisionConfig):
    """CLIP over tiles whose values have three bytes each (``bytes_per_value``)."""

    constants: ClassVar[int] = 2
    without_adapters: ClassVar[tuple[str, ...]] = ("visual.projector",)  # which the constant rows pass, too
    bytes_per_value: ClassVar[int] = PLANES
