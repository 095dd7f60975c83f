"""Qwen3.5, 3.6 and 3.8, and Qwen3-Next: gated DeltaNet in three of four layers, gated attention in the others.

Models with experts have a shared expert with a gate beside the others. Images are in ``multimodal/qwen3_vl``, which
reads the decoder with the functions of this module.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    FULL,
    MOST_HEADS,
    MOST_LAYERS,
    WIDEST,
    experts_of,
    gated_decoder,
    heads_of,
    layer_types,
)
from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.family import BARE, GENERATE, HYBRID, HYBRID_MOE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import RMS_ONE, TextConfig
from trencadis.core.family_configs.qwen3 import dense_layers

LINEAR = "linear_attention"
SECTIONS = (11, 11, 10)
ROTATED = 0.25
"""Default share of a head that rotary positions rotate."""

IGNORED = frozenset(
    ["full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mtp_loss_weight"]
)
"""Keys of the draft layer, whose weights (``mtp.``) are not loaded, and the interval that ``layer_types`` replaces."""

SKIPPED = ("mtp.",)
"""Weights of the draft layer, which guesses tokens ahead."""

PREFIXES = {"model.language_model.": "", "model.": "", "lm_head.": "lm_head."}


def recurrent_of(c: JsonFields) -> RecurrentConfig:
    """Reads the recurrent layers: those listed, or all but every ``full_attention_interval``-th."""
    count = c.integer("num_hidden_layers", most=MOST_LAYERS)
    step = c.integer("full_attention_interval", most=MOST_LAYERS, default=4)
    types = layer_types(c, (FULL, LINEAR)) or [FULL if (i + 1) % step == 0 else LINEAR for i in range(count)]
    if FULL not in types or LINEAR not in types:
        c.refuse("layer_types", f"implemented: {LINEAR} in some layers and {FULL} in others")
    keys = c.integer("linear_num_key_heads", most=MOST_HEADS, default=16)
    values = c.integer("linear_num_value_heads", most=MOST_HEADS, default=32)
    if values % keys:
        c.refuse("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads, which is {keys}")
    c.only("mamba_ssm_dtype", ("float32",), "float32")
    return RecurrentConfig(
        layers=tuple(i for i, kind in enumerate(types) if kind == LINEAR),
        kernel=c.integer("linear_conv_kernel_dim", least=2, most=16, default=4),
        key_heads=keys,
        value_heads=values,
        key_dim=c.integer("linear_key_head_dim", most=WIDEST, default=128),
        value_dim=c.integer("linear_value_head_dim", most=WIDEST, default=128),
    )


def read_decoder(c: JsonFields, tied: bool, *, axes: bool = True) -> TextConfig:
    """Reads the decoder of the family and of its relatives; ``axes``: True if positions have three axes."""
    c.only("hidden_act", ("silu",), "silu")
    c.only("attn_output_gate", (True,), True)
    c.only("attention_bias", (False,), False)
    c = c.with_defaults({"rms_norm_eps": 1e-6})
    if axes:
        c.within("rope_parameters").only("mrope_interleaved", (True,), True)
    recurrent = recurrent_of(c)
    return gated_decoder(
        c, heads_of(c, default=256), tied, positions=32768, axes=axes, sections=SECTIONS, rotated=ROTATED,
        qkv_bias=False, qk_norm=True, interleaved=axes, norm=RMS_ONE, recurrent=recurrent, output_gate=True,
    )  # fmt: skip


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3_5TextConfig."""
    return ParsedConfig(read_decoder(c, tied))


FAMILY = Family(
    name="Qwen3.5",
    model_type="qwen3_5_text",
    architectures={"Qwen3_5ForCausalLM": GENERATE, "Qwen3_5TextModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
    ignored=IGNORED,
    skipped=SKIPPED,
    adapters=HYBRID,
)


ROUTING = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Keys of the loss, and of an output that is not served."""


def read_expert_decoder(c: JsonFields, tied: bool) -> TextConfig:
    """Reads a decoder whose layers all have experts; the weights of a token's experts are divided by their sum."""
    inner = c.integer("moe_intermediate_size", most=WIDEST, default=512)
    text = read_decoder(c.with_defaults({"intermediate_size": inner}), tied)
    experts = experts_of(c.with_defaults({"num_experts": 256}), "num_experts", 8, inner=inner, normalise=True)
    return replace(text, experts=replace(experts, shared=_read_shared(c), shared_gate=True))


def _read_shared(c: JsonFields) -> int:
    """Reads the columns of the shared expert."""
    return c.integer("shared_expert_intermediate_size", most=WIDEST, default=512)


def describe_qwen3_5_moe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3_5MoeTextConfig."""
    return ParsedConfig(read_expert_decoder(c, tied))


def describe_next(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3NextConfig: one axis of positions, and layers that may have one MLP."""
    text = read_decoder(c.with_defaults({"intermediate_size": 5632}), tied, axes=False)
    experts = experts_of(
        c.with_defaults({"num_experts": 512}),
        "num_experts",
        10,
        inner=c.integer("moe_intermediate_size", most=WIDEST, default=512),
        normalise=c.boolean("norm_topk_prob", True),
        dense=dense_layers(c, text.layers),
    )
    experts = replace(experts, shared=_read_shared(c), shared_gate=True)
    assert text.recurrent is not None
    some = experts if len(experts.dense) < text.layers else None
    return ParsedConfig(replace(text, experts=some, recurrent=replace(text.recurrent, interleaved=True)))


QWEN3_5_MOE = Family(
    name="Qwen3.5 with experts",
    model_type="qwen3_5_moe_text",
    architectures={"Qwen3_5MoeForCausalLM": GENERATE, "Qwen3_5MoeTextModel": BARE},
    config=describe_qwen3_5_moe,
    names=StoredNames(PREFIXES),
    ignored=IGNORED | ROUTING,
    skipped=SKIPPED,
    adapters=HYBRID_MOE,
)
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    name="Qwen3-Next",
    model_type="qwen3_next",
    architectures={"Qwen3NextForCausalLM": GENERATE, "Qwen3NextModel": BARE},
    config=describe_next,
    adapters=Family.adapters,  # none of its projections, which are interleaved
)
