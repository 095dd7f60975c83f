"""The Gemma-4 families with images: the text models' decoder, and a tower over images of any aspect ratio.

The 12B model embeds patches of 48 pixels instead, without layers. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.family import GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.family_configs import gemma4
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.gemma4.config import MERGE, Gemma4VisionConfig, PatchEmbedConfig
from trencadis.multimodal.vit.vision_language_config import DECODER_PREFIXES

MOST_POSITIONS = 2**20

TEXT_DEFAULTS: JsonMapping = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""Gemma4TextConfig's values for keys that a text_config omits."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Gemma4Config. Its audio part is not served: requests have no audio."""
    sees = _sees_images(c)  # in layers with a window alone
    text = gemma4.describe(root, c.with_defaults(TEXT_DEFAULTS), tied).text
    text = replace(text, bidirectional_images=sees, causal_full_layers=sees)
    if c is root:
        root.refuse("text_config", "it must be an object")
    c.only("model_type", ("gemma4_text",), "gemma4_text")
    root.is_given("audio_config")
    return ParsedConfig(text, _tower(root.within("vision_config"), text.hidden), _media(root, text.vocab))


def _sees_images(c: JsonFields) -> bool:
    """Returns True if tokens of an image see each other."""
    return c.values.get("use_bidirectional_attention") == "vision"


def _media(root: JsonFields, vocab: int) -> dict[str, int]:
    found = root.integer("image_token_id", 0, 2**31 - 1, 258_880)
    if found >= vocab:
        root.refuse("image_token_id", f"it must be in the vocabulary of {vocab}")
    return {"image_token_id": found}


def _tower(c: JsonFields, width: int) -> Gemma4VisionConfig:
    """Reads transformers' Gemma4VisionConfig."""
    hidden = c.integer("hidden_size", most=WIDEST, default=768)
    heads = c.integer("num_attention_heads", 1, MOST_HEADS, 12)
    c.only("model_type", ("gemma4_vision",), "gemma4_vision")
    c.only("num_key_value_heads", (heads,), 12)
    c.only("attention_bias", (False, None), False)
    c.only("use_clipped_linears", (False,), False)
    c.only("pooling_kernel_size", (MERGE,), MERGE)
    c.only("patch_size", (16,), 16)
    if hidden % heads or hidden // heads % 4 or c.integer("head_dim", default=64) != hidden // heads:
        c.refuse("head_dim", "implemented: hidden_size / num_attention_heads, a multiple of 4")
    rope = c.within("rope_parameters")
    rope.only("rope_type", ("axial",), "axial")
    return Gemma4VisionConfig(
        depth=c.integer("num_hidden_layers", 1, MOST_LAYERS, 16), hidden=hidden, heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=3072), out_hidden=width, patch=16,
        positions=c.integer("position_embedding_size", 1, MOST_POSITIONS, 10240),
        theta=rope.number("rope_theta", 1, 1e12, 100.0), eps=c.number("rms_norm_eps", 0, 1, 1e-6, above=True),
        activation=activation_of(c, "hidden_activation", "gelu_pytorch_tanh"),
        standardise=c.boolean("standardize", False),
    )  # fmt: skip


def describe_unified(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Gemma4UnifiedConfig. Its audio part is not served: requests have no audio."""
    c.only("model_type", ("gemma4_unified_text",), "gemma4_unified_text")
    c = c.with_defaults({**TEXT_DEFAULTS, "use_bidirectional_attention": "vision"})
    text = replace(gemma4.describe_unified(root, c, tied).text, bidirectional_images=_sees_images(c))
    root.is_given("audio_config")
    v = root.within("vision_config")
    v.only("patch_size", (16,), 16)
    v.only("pooling_kernel_size", (MERGE,), MERGE)
    hidden = v.integer("mm_embed_dim", most=WIDEST, default=3840)
    v.only("output_proj_dims", (hidden,), 3840)
    vision = PatchEmbedConfig(
        depth=0, hidden=hidden, heads=0, intermediate=0, out_hidden=text.hidden, patch=16 * MERGE,
        positions=v.integer("mm_posemb_size", 1, MOST_POSITIONS, 1120), theta=1.0, activation="gelu_tanh",
        eps=v.number("rms_norm_eps", 0, 1, 1e-6, above=True), standardise=False,
    )  # fmt: skip
    return ParsedConfig(text, vision, _media(root, text.vocab))


PREFIXES: JsonMapping = {
    "model.vision_tower.": "visual.",
    "model.vision_embedder.": "visual.",
    "model.embed_vision.multimodal_embedder.": "visual.",
    "model.embed_vision.": "visual.",
    "vision_tower.": "visual.",
    "embed_vision.": "visual.",
    **DECODER_PREFIXES,
}
VISION_NAMES = ((".encoder.layers.", ".blocks."), (".linear.", "."))

FAMILY = Family(
    name="Gemma-4",
    model_type="gemma4",
    architectures={"Gemma4ForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, (*VISION_NAMES, *gemma4.NAMES)),
    make="trencadis.multimodal.gemma4.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.gemma4.processor:image_needs",
        sizes="trencadis.multimodal.gemma4.processor:image_sizes",
        processor="trencadis.multimodal.gemma4.processor:from_checkpoint",
        tokens={"image_token_id": "<|image|>"},
    ),
    tied=True,
    ignored=gemma4.FAMILY.ignored
    | {f"{name}_token_id" for name in ("boi", "eoi", "boa", "eoa", "audio", "video")}
    | {"eoa_token_index"},
)
UNIFIED = replace(
    FAMILY,
    name="Gemma-4 12B",
    model_type="gemma4_unified",
    architectures={"Gemma4UnifiedForConditionalGeneration": GENERATE},
    config=describe_unified,
)
