"""The Mistral 3 family, which Ministral-3 belongs to."""

from __future__ import annotations

from trencadis.core.checkpoint.family import EVERY_PART, GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.pixtral.config import (
    MERGE_SIZES,
    VISION_SIDE,
    VIT_DEFAULTS,
    WEIGHT_NAMES,
    PixtralVisionConfig,
    read_pixtral_fields,
)
from trencadis.multimodal.vit.vision_language_config import PREFIXES, read_image_token, read_text_config

IMAGE_TOKEN = 10


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Mistral3Config."""
    text = read_text_config(root, c, tied, ("mistral", "ministral3"))
    merge = root.integer("spatial_merge_size", 1, MERGE_SIZES[-1], 2)
    if merge not in MERGE_SIZES:
        root.refuse("spatial_merge_size", f"implemented: {', '.join(map(str, MERGE_SIZES))}")
    v = root.within("vision_config")
    usual = VIT_DEFAULTS._replace(patch=14, image=1540)
    fields = read_pixtral_fields(root, v, text.hidden, usual, biased=False)
    vision = PixtralVisionConfig(**fields, merge=merge, has_merger=True, merge_eps=text.eps)
    return ParsedConfig(text, vision, {"image_token_id": read_image_token(root, text.vocab, 0, IMAGE_TOKEN)})


FAMILY = Family(
    name="Mistral 3",
    model_type="mistral3",
    architectures={"Mistral3ForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, WEIGHT_NAMES),
    make="trencadis.multimodal.pixtral.model:make",
    vision=VisionSide(**VISION_SIDE),
    pooling=None,
    tied=True,
    ignored=frozenset({"vocab_size"}),
    adapters=EVERY_PART,
)
