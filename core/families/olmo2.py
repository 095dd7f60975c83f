"""OLMo-2: norms after attention and MLP alone; one norm over all heads of q, and one over all of k."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import full_attention, gated_decoder, heads_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import OUT
from trencadis.core.families.llama import PREFIXES

POSITIONS = 2048
"""transformers' default of ``max_position_embeddings``."""

NORM_NAMES = (
    (".post_attention_layernorm.", ".input_layernorm."),
    (".post_feedforward_layernorm.", ".post_attention_layernorm."),
)
"""Stored names of the norms after attention and MLP -> canonical ones."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Olmo2Config."""
    full_attention(c)
    bias = c.boolean("attention_bias", False)
    return ParsedConfig(gated_decoder(
        c.with_defaults({"rms_norm_eps": 1e-5}), heads_of(c, absent=True), tied, positions=POSITIONS, qkv_bias=bias,
        out_bias=bias, norm_placement=OUT, joint_qk_norm=True,
    ))  # fmt: skip


FAMILY = Family(
    name="OLMo-2",
    model_type="olmo2",
    architectures={"Olmo2ForCausalLM": GENERATE, "Olmo2ForSequenceClassification": CLASSIFY, "Olmo2Model": BARE},
    config=describe,
    names=StoredNames(PREFIXES, NORM_NAMES),
)
