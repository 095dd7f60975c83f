"""The LLaVA-1.5 family: CLIP's tower up to the selected layer, a projector; also Pixtral-12B. Torch-free.

The decoder is one of Llama, Mistral, Qwen2 or Qwen3.
"""

from __future__ import annotations

from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.llava.config import CLIP_NAMES, IMAGE_TOKEN, ClipVisionConfig, read_clip_fields
from trencadis.multimodal.pixtral.config import VIT_DEFAULTS, WEIGHT_NAMES, PixtralVisionConfig, read_pixtral_fields
from trencadis.multimodal.vit.vision_language_config import PREFIXES, read_image_token, read_text_config


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' LlavaConfig; the vision_config tells if it is Pixtral-12B."""
    vision_fields = root.within("vision_config")
    if vision_fields.values.get("model_type") == "pixtral":
        text = read_text_config(root, c, tied, ("mistral",))
        root.only("vision_feature_select_strategy", ("full",), "default")
        pixtral = PixtralVisionConfig(
            **read_pixtral_fields(root, vision_fields, text.hidden, VIT_DEFAULTS, biased=True)
        )
        return ParsedConfig(text, pixtral, {"image_token_id": read_image_token(root, text.vocab, 0, IMAGE_TOKEN)})
    text = read_text_config(root, c, tied, ("llama", "mistral", "qwen2", "qwen3"))
    vision = ClipVisionConfig(**read_clip_fields(root, vision_fields, text.hidden))
    return ParsedConfig(
        text, vision, {"image_token_id": read_image_token(root, text.vocab, vision.rows_per_tile, IMAGE_TOKEN)}
    )


FAMILY = Family(
    name="LLaVA-1.5 and Pixtral",
    model_type="llava",
    architectures={"LlavaForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, (*CLIP_NAMES, *WEIGHT_NAMES)),
    make="trencadis.multimodal.llava.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.llava.processor:image_needs",
        sizes="trencadis.multimodal.llava.processor:image_sizes",
        processor="trencadis.multimodal.llava.processor:from_checkpoint",
        tokens={"image_token_index": "<image>"},
    ),
    pooling=None,
    ignored=frozenset({"ignore_index", "vocab_size"}),
    adapters=EVERY_PART,
)
