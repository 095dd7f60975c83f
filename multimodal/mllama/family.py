"""The Llama-3.2-Vision family: Llama's decoder with cross-attention layers, and a vision tower of two stacks."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import GENERATE, Family, ParsedConfig, StoredNames, VisionSide
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.mllama.config import read_vision_config
from trencadis.multimodal.vit.vision_language_config import DECODER_PREFIXES

IMAGE_TOKEN = 128256
VISION_MODEL_TYPE = "mllama_vision_model"
SPARE_VOCAB_ROWS = 8
"""Rows of the embedding table beyond the vocabulary, including the image token's; the head has none of them."""

TEXT_DEFAULTS: JsonMapping = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEFAULT_CROSS_ATTENTION_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
"""MllamaTextConfig's default."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' MllamaConfig. The head is never tied, as in transformers, regardless of the file."""
    c.only("model_type", ("mllama_text_model",), "mllama_text_model")
    c = c.with_defaults(TEXT_DEFAULTS)
    full_attention(c)
    text = gated_decoder(c, heads_of(c, whole=True), False, positions=131072, theta=5e5, qkv_bias=False)
    given = c.is_given("cross_attention_layers")
    cross = c.integers("cross_attention_layers", 1, text.layers - 1) if given else DEFAULT_CROSS_ATTENTION_LAYERS
    if not cross or cross[-1] >= text.layers or sorted({*cross}) != [*cross] or len(cross) == text.layers:
        c.refuse("cross_attention_layers", f"implemented: ascending numbers of some of the {text.layers} layers")
    text = replace(text, cross_attention_layers=tuple(cross), spare=SPARE_VOCAB_ROWS)
    vision = read_vision_config(
        root.within("vision_config"), VISION_MODEL_TYPE, text.hidden, len(cross), text.kv_heads, text.head_dim
    )
    token = root.integer("image_token_index", 0, text.vocab + SPARE_VOCAB_ROWS - 1, IMAGE_TOKEN)
    if token >= text.vocab + SPARE_VOCAB_ROWS:
        root.refuse("image_token_index", f"it must be below {text.vocab + SPARE_VOCAB_ROWS}")
    return ParsedConfig(text, vision, {"image_token_id": token})


_PREFIXES = (("model.vision_model.", "vision_model."), ("model.multi_modal_projector.", "multi_modal_projector."))
FAMILY = Family(
    name="Llama-3.2-Vision",
    model_type="mllama",
    architectures={"MllamaForConditionalGeneration": GENERATE},
    config=describe,
    adapters=(),
    names=StoredNames(
        {
            **{f"{one}transformer.layers.": "visual.blocks." for one in _PREFIXES[0]},
            **{f"{one}global_transformer.layers.": "visual.gated." for one in _PREFIXES[0]},
            **dict.fromkeys(_PREFIXES[0], "visual."),
            **dict.fromkeys(_PREFIXES[1], "visual.projector."),
            **DECODER_PREFIXES,
        },
        (
            (".mlp.fc1.", ".mlp.up_proj."),
            (".mlp.fc2.", ".mlp.down_proj."),
        ),
    ),
    make="trencadis.multimodal.mllama.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.mllama.processor:image_needs",
        sizes="trencadis.multimodal.mllama.processor:image_sizes",
        processor="trencadis.multimodal.mllama.processor:from_checkpoint",
        tokens={"image_token_index": "<|image|>"},
    ),
    pooling=None,
    ignored=frozenset({"dropout"}),
)
