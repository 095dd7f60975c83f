"""CLIP's vision tower and processor settings, which several families use. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trencadis.multimodal.normalisation import PixelNormalisation, read_normalisation
from trencadis.multimodal.vit.config import TileVisionConfig
from trencadis.multimodal.vit.processor import read_processor_settings

BICUBIC = 3


@dataclass(frozen=True)
class ClipVisionConfig(TileVisionConfig):
    """CLIP's vision tower up to the layer whose output is used (``depth`` layers)."""

    first_norm: ClassVar[bool] = True


def read_settings(path: Path, image: int, kinds: tuple[str, ...]) -> PixelNormalisation:
    """Reads the pixel normalisation from a checkpoint's processor file; other settings are checked.

    Raises:
        StartupError: there is no file, or a value is not implemented.
    """
    c = read_processor_settings(path)
    c.only("image_processor_type", kinds, kinds[0])
    for key in ("do_resize", "do_center_crop"):
        c.only(key, (True,), True)
    c.only("resample", (BICUBIC,), BICUBIC)
    size = c.within("size", {"shortest_edge": 224})
    size.only("shortest_edge", (image,), 224)
    if set(size.values) - {"shortest_edge"}:
        c.refuse("size", "implemented: shortest_edge alone")
    if isinstance(c.values.get("crop_size"), int):
        c.only("crop_size", (image,))
    else:
        crop = c.within("crop_size", {"height": 224, "width": 224})
        for key in ("height", "width"):
            crop.only(key, (image,), 224)
    return read_normalisation(c)
