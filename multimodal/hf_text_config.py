"""Reads the text_config of a vision-language checkpoint, with transformers' defaults for its model_type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trencadis.core.checkpoint.family import ParsedConfig
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.families import llama, ministral3, mistral, qwen2, qwen3, qwen3_moe
from trencadis.core.json_types import JsonMapping

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
    "ministral3": (ministral3.describe, MINISTRAL3),
    "qwen3_moe": (qwen3_moe.describe, QWEN3_MOE),
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
