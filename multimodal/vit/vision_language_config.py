"""Reads text_config and vision_config of a vision-language checkpoint, with transformers' defaults. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.family import ParsedConfig
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.family_configs import llama, mistral, qwen2, qwen3
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.multimodal.vit.tile_vision_config import CHANNELS

LLAMA: JsonMapping = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
}  # fmt: skip
MISTRAL: JsonMapping = {
    **LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32,
}  # fmt: skip
QWEN2: JsonMapping = {
    **LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}  # fmt: skip
MINISTRAL3: JsonMapping = {
    **MISTRAL, "vocab_size": 131072, "num_hidden_layers": 34, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_MOE: JsonMapping = {
    **QWEN2, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
}  # fmt: skip
DECODERS: Mapping[str, tuple[Callable[[JsonFields, JsonFields, bool], ParsedConfig], JsonMapping]] = {
    "llama": (llama.describe, LLAMA),
    "mistral": (mistral.describe, MISTRAL),
    "qwen2": (qwen2.describe, QWEN2),
    "qwen3": (qwen3.describe, QWEN2),
    "ministral3": (mistral.describe_ministral3, MINISTRAL3),
    "qwen3_moe": (qwen3.describe_qwen3_moe, QWEN3_MOE),
}
"""model_type -> the parser of the decoder, and the defaults of its configuration."""

DECODER_PREFIXES: Mapping[str, str] = {
    "language_model.model.": "",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "",
    "lm_head.": "lm_head.",
}
"""Stored prefixes of a decoder's weights in a vision-language checkpoint -> canonical ones."""

PREFIXES: Mapping[str, str] = {
    "model.vision_tower.vision_model.": "visual.",
    "vision_tower.vision_model.": "visual.",
    "model.vision_tower.": "visual.",
    "vision_tower.": "visual.",
    "model.multi_modal_projector.": "visual.projector.",
    "multi_modal_projector.": "visual.projector.",
    **DECODER_PREFIXES,
}
"""The same, plus those of a ``vision_tower`` and a ``multi_modal_projector``, in transformers 5 and on the hub."""


def read_text_config(
    root: JsonFields, c: JsonFields, tied: bool, kinds: tuple[str, ...], **defaults: Any
) -> TextConfig:
    """Reads the decoder from a text_config; the default of model_type is the first of ``kinds``."""
    c.only("model_type", kinds, kinds[0])
    describe, left_out = DECODERS[c.values.get("model_type", kinds[0])]
    return describe(root, c.with_defaults({**left_out, **defaults}), tied).text


MAX_SIDE_PIXELS = 4096


class ViTDefaults(NamedTuple):
    """Defaults of a configuration class for keys that a file leaves out."""

    hidden: int
    heads: int
    layers: int
    intermediate: int
    image: int
    patch: int
    eps: float
    activation: str


SIGLIP = ViTDefaults(768, 12, 12, 3072, 224, 16, 1e-6, "gelu_pytorch_tanh")
"""Defaults of SiglipVisionConfig."""

BLOCK_NAMES = (
    (".encoder.layers.", ".blocks."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    (".mlp.fc1.", ".mlp.up_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
)
"""(stored, canonical) parts of weight names in towers with CLIP's or SigLIP's blocks."""


def read_vit_fields(
    c: JsonFields, kinds: tuple[str, ...], defaults: ViTDefaults, out_hidden: int, merge: int = 1, exact: bool = True
) -> JsonObject:
    """Returns the fields of a ``TileVisionConfig`` with all its layers.

    ``kinds``: accepted values of its model_type; ``out_hidden``: the decoder's width; ``merge``: as in
    ``TileVisionConfig``. ``exact``: patches must fill a tile; else the remainder at its right and lower edge is
    ignored.
    """
    c.only("model_type", kinds, kinds[0])
    c.only("num_channels", (CHANNELS,), CHANNELS)
    hidden = c.integer("hidden_size", most=WIDEST, default=defaults.hidden)
    heads = c.integer("num_attention_heads", most=MOST_HEADS, default=defaults.heads)
    if hidden % (2 * heads):
        c.refuse("num_attention_heads", f"implemented: heads of an even size, and hidden_size is {hidden}")
    image, patch = read_square_side(c, "image_size", defaults.image), read_square_side(c, "patch_size", defaults.patch)
    if (exact and image % patch) or image < patch:
        c.refuse("patch_size", f"it must divide image_size, which is {image}")
    if image // patch % merge:
        c.refuse("patch_size", f"{merge} must divide the {image // patch} patches along a side of a tile")
    return dict(
        depth=c.integer("num_hidden_layers", most=MOST_LAYERS, default=defaults.layers),
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=defaults.intermediate),
        out_hidden=out_hidden,
        image=image,
        patch=patch,
        merge=merge,
        eps=c.number("layer_norm_eps", 0, 1, defaults.eps, above=True),
        activation=activation_of(c, "hidden_act", defaults.activation),
    )


def read_square_side(c: JsonFields, key: str, default: int) -> int:
    """Reads a side in pixels, or a pair of equal ones."""
    given = c.values.get(key)
    if not isinstance(given, list):
        return c.integer(key, most=MAX_SIDE_PIXELS, default=default)
    first, second = c.integers(key, 1, MAX_SIDE_PIXELS, length=2)
    if first != second:
        c.refuse(key, "implemented: squares")
    return first


def read_image_token(root: JsonFields, vocab: int, tokens: int, default: int) -> int:
    """Reads the id of the placeholder token.

    ``tokens``: rows of a tile, checked if the file has them; 0: there are no tiles.
    """
    keys = [key for key in ("image_token_index", "image_token_id") if key in root.values]
    token = default
    for key in keys:
        token = root.integer(key, 0, vocab - 1)
    if not keys and vocab <= default:
        root.refuse("image_token_index", "it must be in the vocabulary")
    if tokens and root.integer("image_seq_length", default=tokens) != tokens:
        root.refuse("image_seq_length", f"it must be {tokens}, the rows of a tile")
    return token
