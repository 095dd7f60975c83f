"""The LLaVA-NeXT family: Llama's, Mistral's or Qwen2's decoder, CLIP's tower over tiles, and a newline row. Torch-free.

An image may have one of the grids of tiles that the configuration lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.llava.family import CLIP_NAMES, IMAGE_TOKEN, ClipVisionConfig, read_clip_fields
from trencadis.multimodal.vit.vision_language_config import PREFIXES, read_image_token, read_text_config

MAX_TILES = 64
DEFAULT_GRID_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
NEWLINE = 0
"""Number of the only constant row."""

Size = tuple[int, int]


@dataclass(frozen=True)
class LlavaNextVisionConfig(ClipVisionConfig):
    """CLIP's tower over tiles.

    ``grid_pinpoints``: sizes (height, width) in pixels to which an image may be resized before it is cut into tiles.
    """

    grid_pinpoints: tuple[Size, ...] = ()
    constants: ClassVar[int] = 1

    @property
    def max_tiles(self) -> int:
        """Number of tiles of the largest grid, plus one for the whole image."""
        return 1 + max(h * w for h, w in self.grid_pinpoints) // self.image**2


def read_grid_pinpoints(c: JsonFields, image: int) -> tuple[Size, ...]:
    """Reads ``image_grid_pinpoints``; raises StartupError for sizes that are not whole tiles, or too many of them."""
    key, found = "image_grid_pinpoints", []
    given = c.values.get(key) if c.is_given(key) else [*map(list, DEFAULT_GRID_PINPOINTS)]
    for pair in given if isinstance(given, list) else [None]:
        sides = (
            JsonFields({"pair": pair}, c.where).integers("pair", image, length=2) if isinstance(pair, list) else (1, 1)
        )
        if any(side % image for side in sides) or sides[0] * sides[1] > MAX_TILES * image**2:
            c.refuse(key, f"it must be pairs of multiples of {image}, of {MAX_TILES} tiles at most")
        found.append((sides[0], sides[1]))
    if not found or len(found) > MAX_TILES:
        c.refuse(key, f"it must have 1 to {MAX_TILES} pairs")
    return tuple(found)


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' LlavaNextConfig."""
    text = read_text_config(root, c, tied, ("llama", "mistral", "qwen2"))
    fields = read_clip_fields(root, root.within("vision_config"), text.hidden)
    vision = LlavaNextVisionConfig(**fields, grid_pinpoints=read_grid_pinpoints(root, fields["image"]))
    return ParsedConfig(
        text, vision, {"image_token_id": read_image_token(root, text.vocab, vision.rows_per_tile, IMAGE_TOKEN)}
    )


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
        needs="trencadis.multimodal.vit.tile_image_processor:image_needs",
        sizes="trencadis.multimodal.llava_next.processor:image_sizes",
        processor="trencadis.multimodal.llava_next.processor:from_checkpoint",
        tokens={"image_token_index": "<image>"},
    ),
    pooling=None,
    ignored=frozenset({"ignore_index", "vocab_size", "use_image_newline_parameter"}),
    adapters=EVERY_PART,
)
