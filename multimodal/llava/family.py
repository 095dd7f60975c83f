"""LLaVA-1.5 as a family: Llama's decoder, CLIP's tower up to the layer that is read, a projector."""

from __future__ import annotations

from typing import Any

from trencadis.core.checkpoint.decoder_fields import activation_of
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.lines.config import LineTower
from trencadis.multimodal.llava.clip import ClipTower
from trencadis.multimodal.pixtral.fields import USUAL, tower_fields
from trencadis.multimodal.pixtral.names import NAMES
from trencadis.multimodal.texts import PREFIXES, text_of
from trencadis.multimodal.tiles.fields import BLOCK_NAMES, Usual, placeholder, tile_fields

IMAGE_TOKEN = 32000
CLIP_USUAL = Usual(768, 12, 12, 3072, 224, 32, 1e-5, "quick_gelu")


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """LlavaConfig; its vision_config says whether it is Pixtral-12B."""
    seen = root.within("vision_config")
    if seen.values.get("model_type") == "pixtral":
        text = text_of(root, c, tied, ("mistral",))
        root.only("vision_feature_select_strategy", ("full",), "default")
        lines = LineTower(**tower_fields(root, seen, text.hidden, USUAL, biased=True))
        return Described(text, lines, {"image_token_id": placeholder(root, text.vocab, 0, IMAGE_TOKEN)})
    text = text_of(root, c, tied, ("llama",))
    vision = ClipTower(**clip_fields(root, seen, text.hidden))
    return Described(text, vision, {"image_token_id": placeholder(root, text.vocab, vision.tokens, IMAGE_TOKEN)})


def clip_fields(root: Fields, c: Fields, width: int) -> dict[str, Any]:
    """The fields of a ``ClipTower`` that ends with the layer that is read; ``width``: the decoder's hidden size."""
    root.only("vision_feature_select_strategy", ("default",), "default")
    fields = tile_fields(c, ("clip_vision_model",), CLIP_USUAL, width)
    layers = fields["depth"]
    asked = root.integer("vision_feature_layer", -layers - 1, layers, -2)
    depth = asked if asked >= 0 else layers + 1 + asked
    if depth < 1:
        root.refuse("vision_feature_layer", f"implemented: the output of one of the {layers} layers")
    projector = activation_of(root, "projector_hidden_act", "gelu")
    biased = root.boolean("multimodal_projector_bias", True)
    return {**fields, "depth": depth, "projector": projector, "projector_bias": biased}


CLIP_NAMES = (*BLOCK_NAMES, (".pre_layrnorm.", ".first_norm."))

FAMILY = Family(
    name="LLaVA-1.5 and Pixtral",
    model_type="llava",
    architectures={"LlavaForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, (*CLIP_NAMES, *NAMES)),
    make="trencadis.multimodal.llava.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.llava.processor:image_needs",
        sizes="trencadis.multimodal.llava.processor:image_sizes",
        processor="trencadis.multimodal.llava.processor:from_checkpoint",
        tokens={"image_token_index": "<image>"},
    ),
    pooling=None,
    ignored=frozenset({"ignore_index", "vocab_size"}),
)
