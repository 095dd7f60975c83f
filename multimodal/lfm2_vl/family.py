"""The LFM2-VL family: LFM2's decoder, SigLIP2's tower over tiles and whole images, and a projector of cells."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.family import GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs import lfm2
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.lfm2_vl.config import Lfm2VisionConfig
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vision_language_config import BLOCK_NAMES, read_image_token, read_square_side

IMAGE_TOKEN = 396
MERGES = (1, 2, 4)
"""Values of ``downsample_factor`` whose cells fill a window of slots."""

MOST_SIDE = 64
TEXT_DEFAULTS: JsonMapping = {
    "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
"""Lfm2Config's values for keys that a text_config omits."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Lfm2VlConfig; ``tie_embedding`` is an older name of ``tie_word_embeddings``."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    c.only("model_type", ("lfm2",), "lfm2")
    text = lfm2.read_decoder(c.with_defaults(TEXT_DEFAULTS), root.boolean("tie_embedding", tied))
    vision = _read_tower(root, root.within("vision_config"), text.hidden)
    return ParsedConfig(text, vision, {"image_token_id": read_image_token(root, text.vocab, 0, IMAGE_TOKEN)})


def _read_tower(root: JsonFields, c: JsonFields, width: int) -> Lfm2VisionConfig:
    """Reads transformers' Siglip2VisionConfig, and the projector's keys, which are the model's own."""
    c.only("model_type", ("siglip2_vision_model",), "siglip2_vision_model")
    c.only("num_channels", (CHANNELS,), CHANNELS)
    root.only("downsample_factor", MERGES, 2)
    hidden = c.integer("hidden_size", most=WIDEST, default=768)
    heads = c.integer("num_attention_heads", most=MOST_HEADS, default=12)
    if hidden % (2 * heads):
        c.refuse("num_attention_heads", f"implemented: heads of an even size, and hidden_size is {hidden}")
    places = c.integer("num_patches", most=MOST_SIDE**2, default=256)
    side = int(places**0.5)
    if side * side != places:
        c.refuse("num_patches", "it must be a square number")
    return Lfm2VisionConfig(
        depth=c.integer("num_hidden_layers", most=MOST_LAYERS, default=12), hidden=hidden, heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=3072), out_hidden=width,
        patch=read_square_side(c, "patch_size", 16), merge=root.integer("downsample_factor", default=2), side=side,
        eps=c.number("layer_norm_eps", 0, 1, 1e-6, above=True),
        activation=activation_of(c, "hidden_act", "gelu_pytorch_tanh"),
        inner=root.integer("projector_hidden_size", most=WIDEST, default=2560),
        projector=activation_of(root, "projector_hidden_act", "gelu"),
        projector_bias=root.boolean("projector_bias", True), cell_norm=root.boolean("projector_use_layernorm", True),
    )  # fmt: skip


PREFIXES: JsonMapping = {
    "model.language_model.embedding_norm.": "norm.",
    "model.language_model.": "",
    "model.vision_tower.vision_model.": "visual.",
    "model.vision_tower.": "visual.",
    "model.multi_modal_projector.layer_norm.": "visual.projector.cell_norm.",
    "model.multi_modal_projector.": "visual.projector.",
    "lm_head.": "lm_head.",
}
PROCESSOR_KEYS = (
    "do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches", "max_pixels_tolerance",
    "max_tiles", "min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail",
)  # fmt: skip
"""Keys of published files that the image processor's own file has, from which they are read."""

FAMILY = Family(
    name="LFM2-VL",
    model_type="lfm2_vl",
    architectures={"Lfm2VlForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, (*BLOCK_NAMES, (".post_layernorm.", ".last_norm."), *lfm2.INNER_NAMES)),
    make="trencadis.multimodal.lfm2_vl.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.lfm2_vl.processor:image_needs",
        sizes="trencadis.multimodal.lfm2_vl.processor:image_sizes",
        processor="trencadis.multimodal.lfm2_vl.processor:from_checkpoint",
        tokens={"image_token_id": "<image>"},
    ),
    pooling=None,
    tied=True,
    ignored=lfm2.IGNORED | set(PROCESSOR_KEYS) | {"vision_feature_layer", "tie_embedding", "vocab_size"},
    adapters=lfm2.FAMILY.adapters,
)
