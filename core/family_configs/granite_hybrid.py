"""IBM's Granite 4: Mamba-2 in most layers and attention in others, experts beside a shared MLP, four multipliers."""

from __future__ import annotations

import math
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
from trencadis.core.checkpoint.family import BARE, GENERATE, HYBRID, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.family_configs.llama import PREFIXES, multiplier

ATTENTION, MAMBA = (FULL, "attention"), ("linear_attention", "mamba")
"""Names of the kinds of layers in files of transformers 5 and in older ones."""

UNROTATED = (None, "nope")
MOST_TAPS = 16


def _recurrent(c: JsonFields) -> RecurrentConfig | None:
    """Reads the layers of Mamba-2; None: there are none."""
    count = c.integer("num_hidden_layers", most=MOST_LAYERS)
    types = layer_types(c, (*ATTENTION, *MAMBA)) or [MAMBA[0]] * count
    layers = tuple(i for i, kind in enumerate(types) if kind in MAMBA)
    if len(layers) == count:
        c.refuse("layer_types", "implemented: attention in some layer")
    hidden = c.integer("hidden_size", most=WIDEST)
    heads = c.integer("mamba_n_heads", most=MOST_HEADS, default=128)
    groups = c.integer("mamba_n_groups", most=MOST_HEADS, default=1)
    width = c.integer("mamba_expand", most=64, default=2) * hidden
    if heads % groups:
        c.refuse("mamba_n_groups", f"it must divide mamba_n_heads, which is {heads}")
    given = c.is_given("mamba_d_head") and c.values["mamba_d_head"] != "auto"
    size = c.integer("mamba_d_head") if given else width // heads
    if size * heads != width:
        c.refuse("mamba_d_head", f"mamba_n_heads of it must make mamba_expand * hidden_size, which is {width}")
    refuse_step_limits(c)
    found = RecurrentConfig(
        layers, kernel=c.integer("mamba_d_conv", least=2, most=MOST_TAPS, default=4), key_heads=groups,
        value_heads=heads, key_dim=c.integer("mamba_d_state", most=WIDEST, default=256), value_dim=size,
        scan=True, conv_bias=c.boolean("mamba_conv_bias", True), projection_bias=c.boolean("mamba_proj_bias", False),
    )  # fmt: skip
    return found if layers else None


def refuse_step_limits(c: JsonFields) -> None:
    """Raises StartupError if the steps of Mamba-2 have limits."""
    limits = c.values["time_step_limit"] if c.is_given("time_step_limit") else (0, math.inf)
    least, most = limits if isinstance(limits, list | tuple) and len(limits) == 2 else (None, None)
    most = most.get("__float__") if isinstance(most, dict) else most  # a form in which JSON files have infinity
    if least != 0 or most not in (math.inf, "Infinity"):
        c.refuse("time_step_limit", "implemented: steps without a limit, [0.0, Infinity]")


def read_decoder(c: JsonFields, tied: bool) -> TextConfig:
    """Reads the keys of transformers' GraniteMoeHybridConfig."""
    c.only("hidden_act", ("silu", "swish"), "silu")
    if c.is_given("normalization_function"):
        c.only("normalization_function", ("rmsnorm",), "rmsnorm")
    c.only("position_embedding_type", ("rope", *UNROTATED), None)
    bias, recurrent = c.boolean("attention_bias", False), _recurrent(c)
    shared = c.integer("shared_intermediate_size", most=WIDEST, default=1024)
    named = c.with_defaults({"rms_norm_eps": 1e-6}).with_values(intermediate_size=shared)
    text = gated_decoder(
        named, heads_of(c, absent=True), tied, positions=2048, qkv_bias=bias, out_bias=bias, recurrent=recurrent,
        rotary=c.values.get("position_embedding_type") == "rope",
    )  # fmt: skip
    rotary = text.score_scale * text.head_dim**0.5 if text.rotary else 1.0  # as in ``llama.describe_granite``
    experts = None
    c.integer("num_experts_per_tok", 0, default=2)
    if c.integer("num_local_experts", 0, default=8):
        inner = c.integer("intermediate_size", most=WIDEST, default=11008)
        experts = experts_of(
            c.with_defaults({"num_local_experts": 8}), "num_local_experts", 2, inner=inner, normalise=True
        )
        experts = replace(experts, shared=shared, shared_name="")
    return replace(
        text, experts=experts, scale=rotary * multiplier(c, "attention_multiplier"),
        embedding_scale=multiplier(c, "embedding_multiplier"), residual_scale=multiplier(c, "residual_multiplier"),
        logit_scale=1 / multiplier(c, "logits_scaling"),
    )  # fmt: skip


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads a text model."""
    return ParsedConfig(read_decoder(c, tied))


NAMES = (
    (".mamba.", ".linear_attn."),
    (".shared_mlp.input_linear.", ".mlp.gate_up_proj."), (".shared_mlp.output_linear.", ".mlp.down_proj."),
    (".block_sparse_moe.", ".mlp."), (".input_linear.weight", ".experts.gate_up_proj"),
    (".output_linear.weight", ".experts.down_proj"), (".router.layer.", ".gate."), (".router.", ".gate."),
)  # fmt: skip

FAMILY = Family(
    name="Granite 4",
    model_type="granitemoehybrid",
    architectures={"GraniteMoeHybridForCausalLM": GENERATE, "GraniteMoeHybridModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES, NAMES),
    ignored=frozenset({
        "output_router_logits", "router_aux_loss_coef", "mamba_chunk_size", "init_method", "embedding_dropout",
    }),
    adapters=HYBRID,
)  # fmt: skip
