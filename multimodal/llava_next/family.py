"""LLaVA-NeXT as a family: Llama's, Mistral's or Qwen2's decoder, CLIP's tower over tiles, and a newline row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.llava.clip import ClipTower
from trencadis.multimodal.llava.family import CLIP_NAMES, IMAGE_TOKEN, clip_fields
from trencadis.multimodal.texts import PREFIXES, text_of
from trencadis.multimodal.tiles.fields import placeholder

MOST_TILES = 64
USUAL = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
NEWLINE = 0
"""The one constant row."""

Size = tuple[int, int]


@dataclass(frozen=True)
class GridTower(ClipTower):
    """CLIP over tiles; ``grids``: (height, width) in pixels of what a picture may be resized to and cut into tiles."""

    grids: tuple[Size, ...] = ()
    constants: ClassVar[int] = 1

    @property
    def most_tiles(self) -> int:
        """Those of the largest grid, and the whole picture once more."""
        return 1 + max(h * w for h, w in self.grids) // self.image**2


def grids_of(c: Fields, image: int) -> tuple[Size, ...]:
    """``image_grid_pinpoints``; raises StartupError for sizes that are not whole tiles, or too many of them."""
    key, found = "image_grid_pinpoints", []
    given = c.values.get(key) if c.given(key) else [*map(list, USUAL)]
    for pair in given if isinstance(given, list) else [None]:
        sides = Fields({"pair": pair}, c.where).integers("pair", image, length=2) if isinstance(pair, list) else (1, 1)
        if any(side % image for side in sides) or sides[0] * sides[1] > MOST_TILES * image**2:
            c.refuse(key, f"it must be pairs of multiples of {image}, of {MOST_TILES} tiles at most")
        found.append((sides[0], sides[1]))
    if not found or len(found) > MOST_TILES:
        c.refuse(key, f"it must have 1 to {MOST_TILES} pairs")
    return tuple(found)


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """LlavaNextConfig."""
    text = text_of(root, c, tied, ("llama", "mistral", "qwen2"))
    fields = clip_fields(root, root.within("vision_config"), text.hidden)
    vision = GridTower(**fields, grids=grids_of(root, fields["image"]))
    return Described(text, vision, {"image_token_id": placeholder(root, text.vocab, vision.tokens, IMAGE_TOKEN)})


FAMILY = Family(
    name="LLaVA-NeXT",
    model_type="llava_next",
    architectures={"LlavaNextForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(
        {"model.image_newline": "visual.image_newline", "image_newline": "visual.image_newline", **PREFIXES}, CLIP_NAMES
    ),
    make="trencadis.multimodal.llava_next.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.tiles.processor:image_needs",
        sizes="trencadis.multimodal.llava_next.processor:image_sizes",
        processor="trencadis.multimodal.llava_next.processor:from_checkpoint",
        tokens={"image_token_index": "<image>"},
    ),
    pooling=None,
    ignored=frozenset({"ignore_index", "vocab_size", "use_image_newline_parameter"}),
)
