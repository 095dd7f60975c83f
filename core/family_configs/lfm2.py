"""Liquid AI's LFM2: short convolutions in most layers, attention in others. ``multimodal/lfm2_vl`` adds images."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    FULL,
    MOST_LAYERS,
    WIDEST,
    gated_decoder,
    heads_of,
    layer_types,
)
from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.family import BARE, GENERATE, HYBRID, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import TextConfig

CONVOLUTION = "conv"
MOST_TAPS = 16


def _inner_size(c: JsonFields) -> int:
    """Returns the columns of the MLP: those of the file, or two thirds of them, times a factor, rounded up."""
    size = c.integer("block_ff_dim" if c.is_given("block_ff_dim") else "intermediate_size", most=WIDEST, default=12288)
    factor = c.number("block_ffn_dim_multiplier", 0, 1e3, 1.0, above=True)
    unit = c.integer("block_multiple_of", most=WIDEST, default=256)
    if not c.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if c.values.get("block_ffn_dim_multiplier", factor) is None:  # transformers then rounds nothing
        return size
    return -(-int(factor * size) // unit) * unit


def _convolutions(c: JsonFields) -> tuple[int, ...]:
    """Returns the layers that are convolutions: those of ``layer_types``, or all that ``full_attn_idxs`` leaves out."""
    count = c.integer("num_hidden_layers", most=MOST_LAYERS)
    full = c.integers("full_attn_idxs", most=count - 1) if c.is_given("full_attn_idxs") else tuple(range(count))
    types = layer_types(c, (FULL, CONVOLUTION)) or [FULL if i in full else CONVOLUTION for i in range(count)]
    if FULL not in types:
        named = "layer_types" if c.is_given("layer_types") else "full_attn_idxs"
        c.refuse(named, "implemented: attention in some layer")
    return tuple(i for i, kind in enumerate(types) if kind == CONVOLUTION)


def read_decoder(c: JsonFields, tied: bool) -> TextConfig:
    """Reads the keys of transformers' Lfm2Config."""
    c.only("conv_bias", (False,), False)
    layers = _convolutions(c)
    kernel = c.integer("conv_L_cache", least=2, most=MOST_TAPS, default=3)
    eps = c.number("norm_eps", 0, 1, 1e-5, above=True)
    named = c.with_values(rms_norm_eps=eps, intermediate_size=_inner_size(c))
    text = gated_decoder(named, heads_of(c), tied, positions=128_000, theta=1e6, qkv_bias=False, qk_norm=True)
    return replace(text, recurrent=RecurrentConfig(layers, kernel, width=text.hidden) if layers else None)


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads a text model; ``tie_embedding`` is an older name of ``tie_word_embeddings``."""
    return ParsedConfig(read_decoder(c, c.boolean("tie_embedding", tied)))


INNER_NAMES = (
    (".conv.", ".linear_attn."),
    (".operator_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."), (".q_layernorm.", ".q_norm."), (".k_layernorm.", ".k_norm."),
    (".feed_forward.w1.", ".mlp.gate_proj."), (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
)  # fmt: skip

IGNORED = frozenset({
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
})  # fmt: skip
"""Keys of published files that transformers does not read either."""

FAMILY = Family(
    name="LFM2",
    model_type="lfm2",
    architectures={"Lfm2ForCausalLM": GENERATE, "Lfm2Model": BARE},
    config=describe,
    names=StoredNames({"model.embedding_norm.": "norm.", "model.": "", "lm_head.": "lm_head."}, INNER_NAMES),
    tied=True,
    ignored=IGNORED,
    adapters=HYBRID,
)
