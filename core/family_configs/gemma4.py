"""Gemma-4 text models: layers with full attention have heads of their own; experts may stand beside the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from trencadis.core.checkpoint.decoder_config_parsers import (
    FULL,
    MOST_EXPERTS,
    MOST_HEADS,
    MOST_LAYERS,
    SLIDING,
    WIDEST,
    Heads,
    gated_decoder,
    heads_of,
    layer_types,
    rotary_tables,
    windows_of,
)
from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig, FullHeads
from trencadis.core.checkpoint.family import BARE, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import SANDWICH
from trencadis.core.checkpoint.rope_config import LARGEST_BASE, LARGEST_FACTOR, ProportionalScaling
from trencadis.core.family_configs.llama import PREFIXES

PATTERN = 6
"""Without ``layer_types`` every sixth layer has full attention."""


GLOBAL_SIZE = 512
"""Default of ``global_head_dim``."""

LOCAL_BASE = 1e4
LARGEST_CAP = 1e6


class FullRotary(NamedTuple):
    """The rotary table of layers with full attention; ``scaling`` None: all values of a head are rotated."""

    theta: float
    scaling: ProportionalScaling | None


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Gemma4TextConfig."""
    if c.is_given("use_bidirectional_attention"):
        c.only("use_bidirectional_attention", ("vision",))
    layers = c.integer("num_hidden_layers", most=MOST_LAYERS)
    types = layer_types(c) or [FULL if (i + 1) % PATTERN == 0 else SLIDING for i in range(layers)]
    types = [*types[:-1], FULL]  # as in transformers
    windows = windows_of(c, c.integer("sliding_window", default=512), types)
    heads, bias = heads_of(c, default=256), c.boolean("attention_bias", False)
    full = full_heads_of(c, heads, [i for i, kind in enumerate(types) if kind == FULL])
    local, rotary = rotary_of(c, full.head_dim)
    text = gated_decoder(
        c.with_values(rope_scaling=None, rope_parameters={"rope_theta": rotary.theta}), heads, tied,
        positions=131072, act=("hidden_activation", "gelu_pytorch_tanh"), qkv_bias=bias, out_bias=bias,
        norm_placement=SANDWICH, qk_norm=True, v_norm=True, embedding_scale=heads.hidden**0.5, layer_scale=True,
        **windows._asdict(),
    )  # fmt: skip
    text = replace(
        text, scale=1.0, rope_scaling=rotary.scaling, logit_cap=logit_cap_of(c), experts=experts_beside(c),
        **sharing_of(c, types)._asdict(),
    )  # fmt: skip
    if not text.window:  # every layer has full attention
        return ParsedConfig(replace(text, **full._asdict()))
    return ParsedConfig(replace(text, full_heads=full, local_theta=local))


def full_heads_of(c: JsonFields, heads: Heads, full: list[int]) -> FullHeads:
    """Reads the heads of the layers ``full``, those with full attention; others have ``heads``."""
    shared = c.boolean("attention_k_eq_v", False)
    listed = c.is_given("per_layer_config")
    own = _listed_heads(c, full) if listed else c
    size = ("head_dim", heads.head_dim) if listed else ("global_head_dim", GLOBAL_SIZE)
    count = "num_key_value_heads" if listed else "num_global_key_value_heads"
    head_dim = own.integer(size[0], most=WIDEST, default=size[1])
    counts = own.is_given(count) and (shared or listed)
    kv_heads = own.integer(count, most=MOST_HEADS) if counts else heads.kv_heads
    if head_dim % 2:
        own.refuse(size[0], "implemented: heads of an even size")
    if heads.heads % kv_heads:
        own.refuse(count, f"it must divide num_attention_heads, which is {heads.heads}")
    return FullHeads(kv_heads, head_dim, shared)


def _listed_heads(c: JsonFields, full: list[int]) -> JsonFields:
    """Returns what ``per_layer_config`` says of each of the layers ``full``; refuses any other use of it."""
    listed = c.within("per_layer_config")
    values = list(listed.values.values())
    named = sorted(int(key) if key.isdigit() else -1 for key in listed.values)
    if values and (named != full or any(one != values[0] for one in values)):
        c.refuse("per_layer_config", "implemented: the same values for all layers with full attention, and no others")
    own = listed.within(next(iter(listed.values))) if values else JsonFields({}, c.where, "per_layer_config.")
    for key in own.values:
        if key not in ("head_dim", "num_key_value_heads"):
            own.refuse(key, "implemented: head_dim and num_key_value_heads")
    return own


def rotary_of(c: JsonFields, head_dim: int) -> tuple[float, FullRotary]:
    """Returns (base of the layers with a window, table of the others, whose heads have ``head_dim`` values)."""
    if not c.is_given("rope_parameters"):
        return LOCAL_BASE, FullRotary(1e6, ProportionalScaling(head_dim // 8, 1.0))
    sliding, full = rotary_tables(c)
    local = sliding.number("rope_theta", 0, LARGEST_BASE, LOCAL_BASE, above=True)
    theta = full.number("rope_theta", 0, LARGEST_BASE, LOCAL_BASE, above=True)
    full.only("rope_type", ("proportional", "default"), "default")
    if full.values.get("rope_type", "default") == "default":
        full.only("partial_rotary_factor", (None, 1.0, 1), None)
        return local, FullRotary(theta, None)
    share = full.number("partial_rotary_factor", 0, 1, 1.0)
    factor = full.number("factor", 0, LARGEST_FACTOR, 1.0, above=True)
    return local, FullRotary(theta, ProportionalScaling(int(share * head_dim // 2), factor))


class Sharing(NamedTuple):
    """Fields of ``TextConfig``: layers without keys of their own, and embeddings for each layer."""

    shared_kv: int
    wide_readers: bool
    layer_inputs: int
    layer_vocab: int
    layer_pad: int


def sharing_of(c: JsonFields, types: list[str]) -> Sharing:
    """Reads ``num_kv_shared_layers`` and the sizes of the embeddings for each layer, which the small models have."""
    shared = c.integer("num_kv_shared_layers", 0, default=0)
    if shared and {*types[: max(len(types) - shared, 0)]} != {*types}:
        c.refuse("num_kv_shared_layers", "each kind of layer must have one whose keys and values later ones can read")
    wide, own = c.boolean("use_double_wide_mlp", False), 0
    if c.values.get("hidden_size_per_layer_input", 256) is not None:
        own = c.integer("hidden_size_per_layer_input", 0, WIDEST, 256)
    vocab = c.integer("vocab_size_per_layer_input", most=WIDEST, default=262144) if own else 0
    pad = c.integer("pad_token_id", 0, default=0) if own and c.is_given("pad_token_id") else 0
    return Sharing(shared, wide, own, vocab, pad)


def logit_cap_of(c: JsonFields) -> float:
    """Reads ``final_logit_softcapping``; 0: logits have no cap."""
    key = "final_logit_softcapping"
    return c.number(key, 0, LARGEST_CAP, above=True) if c.is_given(key) else 0.0


def experts_beside(c: JsonFields) -> ExpertsConfig | None:
    """Reads the experts beside each layer's MLP; None: there are none."""
    if not c.boolean("enable_moe_block", False):
        return None
    count, inner = c.integer("num_experts", most=MOST_EXPERTS), c.integer("moe_intermediate_size", most=WIDEST)
    return ExpertsConfig(count, c.integer("top_k_experts", most=count), inner, normalise=True, beside=True)


NAMES = (
    (".post_attention_layernorm.", ".attention_out_layernorm."),
    (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".mlp_out_layernorm."),
    (".pre_feedforward_layernorm_2.", ".beside.input_layernorm."),
    (".post_feedforward_layernorm_1.", ".beside.mlp_layernorm."),
    (".post_feedforward_layernorm_2.", ".beside.out_layernorm."),
    (".experts.", ".beside.experts."),
    (".router.proj.", ".beside.gate."),
    (".router.", ".beside."),
)

FAMILY = Family(
    name="Gemma-4 (text)",
    model_type="gemma4_text",
    architectures={"Gemma4ForCausalLM": GENERATE, "Gemma4TextModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES, NAMES),
    tied=True,
    ignored=frozenset(
        {"vocab_size_per_layer_input", "use_double_wide_mlp", "moe_intermediate_size", "num_experts", "top_k_experts"}
    ),  # read where they count
)


def describe_unified(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Gemma4UnifiedTextConfig, which has neither experts nor embeddings for each layer."""
    defaults = {"sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0}
    return describe(root, c.with_defaults(defaults), tied)


UNIFIED = replace(
    FAMILY,
    name="Gemma-4 12B (text)",
    model_type="gemma4_unified_text",
    architectures={"Gemma4UnifiedForCausalLM": GENERATE, "Gemma4UnifiedTextModel": BARE},
    config=describe_unified,
)
