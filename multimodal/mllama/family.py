"""Llama-3.2-Vision as a family: Llama's decoder with layers that attend to pictures, a tower of two stacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trencadis.core.checkpoint.decoder_fields import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.stacks.config import tower_of
from trencadis.multimodal.texts import PARTS

IMAGE_TOKEN = 128256
TOWER = "mllama_vision_model"
SPARE = 8
"""Rows of the embedding's table behind the vocabulary, the picture's mark among them; the head has none of them."""

TEXT: Mapping[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
}  # fmt: skip
CROSSING = (3, 8, 13, 18, 23, 28, 33, 38)
"""MllamaTextConfig's values of keys that a file leaves out."""


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """MllamaConfig. transformers ties no head here, whatever the file says."""
    c.only("model_type", ("mllama_text_model",), "mllama_text_model")
    c = c.over(TEXT)
    full_attention(c)
    text = gated_decoder(c, heads_of(c, whole=True), False, positions=131072, theta=5e5, qkv_bias=False)
    given = c.given("cross_attention_layers")
    cross = c.integers("cross_attention_layers", 1, text.layers - 1) if given else CROSSING
    if not cross or cross[-1] >= text.layers or sorted({*cross}) != [*cross] or len(cross) == text.layers:
        c.refuse("cross_attention_layers", f"implemented: ascending numbers of some of the {text.layers} layers")
    text = replace(text, cross=tuple(cross), spare=SPARE)
    vision = tower_of(root.within("vision_config"), TOWER, text.hidden, len(cross), text.kv_heads, text.head_dim)
    token = root.integer("image_token_index", 0, text.vocab + SPARE - 1, IMAGE_TOKEN)
    if token >= text.vocab + SPARE:
        root.refuse("image_token_index", f"it must be below {text.vocab + SPARE}")
    return Described(text, vision, {"image_token_id": token})


_AT = (("model.vision_model.", "vision_model."), ("model.multi_modal_projector.", "multi_modal_projector."))
FAMILY = Family(
    name="Llama-3.2-Vision",
    model_type="mllama",
    architectures={"MllamaForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(
        {
            **{f"{one}transformer.layers.": "visual.blocks." for one in _AT[0]},
            **{f"{one}global_transformer.layers.": "visual.gated." for one in _AT[0]},
            **dict.fromkeys(_AT[0], "visual."),
            **dict.fromkeys(_AT[1], "visual.projector."),
            **PARTS,
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
