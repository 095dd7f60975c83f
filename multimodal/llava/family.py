"""LLaVA-1.5 as a family: Llama's decoder, CLIP's tower up to the layer that is read, a projector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.core.checkpoint.decoder_fields import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.llava.clip import ClipTower
from trencadis.multimodal.texts import PARTS, text_of
from trencadis.multimodal.tiles.config import CHANNELS

MOST_PIXELS = 4096
IMAGE_TOKEN = 32000


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """LlavaConfig."""
    text = text_of(root, c, tied, ("llama",))
    vision = ClipTower(**clip_fields(root, root.within("vision_config"), text.hidden))
    return Described(text, vision, {"image_token_id": image_token(root, text.vocab, vision.tokens)})


def image_token(root: Fields, vocab: int, tokens: int, default: int = IMAGE_TOKEN) -> int:
    """Id of the placeholder; ``tokens``: of a tile, which the file may state."""
    keys = [key for key in ("image_token_index", "image_token_id") if key in root.values]
    token = default
    for key in keys:
        token = root.integer(key, 0, vocab - 1)
    if not keys and vocab <= default:
        root.refuse("image_token_index", "it must be in the vocabulary")
    if root.integer("image_seq_length", default=tokens) != tokens:
        root.refuse("image_seq_length", f"it must be {tokens}, the rows of a tile")
    return token


def clip_fields(root: Fields, c: Fields, width: int) -> dict[str, Any]:
    """The fields of a ``ClipTower``; ``width``: of the decoder."""
    c.only("model_type", ("clip_vision_model",), "clip_vision_model")
    c.only("num_channels", (CHANNELS,), CHANNELS)
    root.only("vision_feature_select_strategy", ("default",), "default")
    hidden = c.integer("hidden_size", most=WIDEST, default=768)
    heads = c.integer("num_attention_heads", most=MOST_HEADS, default=12)
    if hidden % (2 * heads):
        c.refuse("num_attention_heads", f"implemented: heads of an even size, and hidden_size is {hidden}")
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS, default=12)
    asked = root.integer("vision_feature_layer", -layers - 1, layers, -2)
    depth = asked if asked >= 0 else layers + 1 + asked
    if depth < 1:
        root.refuse("vision_feature_layer", f"implemented: the output of one of the {layers} layers")
    image, patch = c.integer("image_size", most=MOST_PIXELS, default=224), c.integer("patch_size", default=32)
    if image % patch or image < patch:
        c.refuse("patch_size", f"it must divide image_size, which is {image}")
    return dict(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=3072),
        out_hidden=width,
        image=image,
        patch=patch,
        eps=c.number("layer_norm_eps", 0, 1, 1e-5, above=True),
        activation=activation_of(c, "hidden_act", "quick_gelu"),
        projector=activation_of(root, "projector_hidden_act", "gelu"),
        projector_bias=root.boolean("multimodal_projector_bias", True),
    )


PREFIXES: Mapping[str, str] = {
    "model.vision_tower.vision_model.": "visual.",
    "vision_tower.vision_model.": "visual.",
    "model.vision_tower.": "visual.",
    "vision_tower.": "visual.",
    "model.multi_modal_projector.": "visual.projector.",
    "multi_modal_projector.": "visual.projector.",
    **PARTS,
}
CLIP_NAMES = (
    (".encoder.layers.", ".blocks."),
    (".pre_layrnorm.", ".first_norm."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    (".mlp.fc1.", ".mlp.up_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
)

FAMILY = Family(
    name="LLaVA-1.5",
    model_type="llava",
    architectures={"LlavaForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, CLIP_NAMES),
    make="trencadis.multimodal.llava.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.tiles.processor:image_needs",
        sizes="trencadis.multimodal.llava.processor:image_sizes",
        processor="trencadis.multimodal.llava.processor:from_checkpoint",
        tokens={"image_token_index": "<image>"},
    ),
    pooling=None,
    ignored=frozenset({"ignore_index", "vocab_size"}),
)
