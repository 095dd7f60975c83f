"""The LLaVA-NeXT family: Llama's, Mistral's or Qwen2's decoder, CLIP's tower over tiles, and a newline row."""

from __future__ import annotations

from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.llava.config import CLIP_NAMES, IMAGE_TOKEN, read_clip_fields
from trencadis.multimodal.llava_next.config import LlavaNextVisionConfig, read_grid_pinpoints
from trencadis.multimodal.vit.vision_language_config import PREFIXES, read_image_token, read_text_config


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
