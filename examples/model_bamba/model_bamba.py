"""Bamba (IBM, Princeton, UIUC) for Trencadis: state spaces in most layers, in a package of its own."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, gated_decoder, heads_of
from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.family import BARE, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields

HALF = 0.5
"""Share of a head that rotary positions rotate: transformers' value, whatever the file says."""


def state_spaces(c: JsonFields, hidden: int) -> RecurrentConfig:
    """The layers that ``attn_layer_indices`` does not name, and the sizes of their states."""
    count = c.integer("num_hidden_layers", most=MOST_LAYERS)
    full = c.integers("attn_layer_indices", most=count - 1) if c.is_given("attn_layer_indices") else ()
    heads = c.integer("mamba_n_heads", most=MOST_HEADS, default=128)
    width = c.integer("mamba_expand", most=64, default=2) * hidden
    c.only("mamba_n_groups", (1,), 1)
    c.only("mamba_d_head", ("auto", width // heads), "auto")
    c.only("mamba_proj_bias", (False,), False)
    c.only("mamba_conv_bias", (True,), True)
    c.only("time_step_limit", (None, [0.0, {"__float__": "Infinity"}]), None)
    if not full or len(set(full)) == count:
        c.refuse("attn_layer_indices", "implemented: some layers with attention and some without")
    return RecurrentConfig(
        layers=tuple(i for i in range(count) if i not in full),
        kernel=c.integer("mamba_d_conv", least=2, most=16, default=4),
        key_heads=1,
        key_dim=c.integer("mamba_d_state", most=WIDEST, default=256),
        value_heads=heads,
        value_dim=width // heads,
        scan=True,
        conv_bias=True,
    )


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """BambaConfig."""
    c.only("hidden_act", ("silu",), "silu")
    c.only("partial_rotary_factor", (HALF,), HALF)
    heads, bias = heads_of(c), c.boolean("attention_bias", False)
    text = gated_decoder(
        c.with_defaults({"rms_norm_eps": 1e-5}), heads, tied, positions=262144, rotated=HALF, qkv_bias=bias,
        out_bias=bias, mlp_bias=c.boolean("mlp_bias", False),
    )  # fmt: skip
    return ParsedConfig(replace(text, recurrent=state_spaces(c, heads.hidden)))


NAMES = StoredNames(
    {"model.final_layernorm.": "norm.", "model.": "", "lm_head.": "lm_head."},
    (
        (".mamba.", ".linear_attn."),
        (".pre_ff_layernorm.", ".post_attention_layernorm."),
        (".feed_forward.", ".mlp."),
    ),
)

FAMILY = Family(
    name="Bamba",
    model_type="bamba",
    architectures={"BambaForCausalLM": GENERATE, "BambaModel": BARE},
    config=describe,
    names=NAMES,
    make="bamba_layers:make",
    ignored=frozenset({"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"}),
    adapters=(),
)
