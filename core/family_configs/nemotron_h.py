"""NVIDIA's Nemotron-H and Nemotron-3, whose layers are one part each: Mamba-2, attention, an MLP or experts.

transformers raises the steps of prompts to ``time_step_min``, but not those of decoded tokens. NVIDIA's own code raises
neither, as here: the key is a bound of what training begins with.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    FULL,
    MOST_HEADS,
    MOST_LAYERS,
    WIDEST,
    activation_of,
    experts_of,
    heads_of,
)
from trencadis.core.checkpoint.decoder_layer_config import ExpertsConfig, RecurrentConfig, SigmoidRouting
from trencadis.core.checkpoint.family import BARE, GENERATE, HYBRID, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import PLAIN, TextConfig
from trencadis.core.family_configs.granite_hybrid import MOST_TAPS, refuse_step_limits

SCAN, MLP, MOE = "linear_attention", "mlp", "moe"
PATTERN = "hybrid_override_pattern"
LETTERS = {"M": SCAN, "*": FULL, "-": MLP, "E": MOE}
"""Letters of ``hybrid_override_pattern`` -> kinds of layers."""

OLD_KINDS = {"mamba": SCAN, "attention": FULL}
"""Names of kinds of layers in files of transformers 4 -> those of transformers 5."""

OTHER_NAMES = (
    "mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_dt_min", "mamba_dt_max", "mamba_dt_limit",
    "mamba_dt_init_floor", "mamba_conv_bias", "mamba_chunk_size",
)  # fmt: skip
"""Names that transformers reads before the usual ones, which files have."""


EXPERT_KEYS = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
    "moe_latent_size", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor",
)  # fmt: skip
"""Keys that change nothing in models without experts."""


def _layers_key(c: JsonFields) -> str:
    """Returns the key that names the kind of each layer."""
    return next((key for key in ("layers_block_type", "layer_types") if c.is_given(key)), PATTERN)


def _layer_kinds(c: JsonFields) -> list[str]:
    """Returns the kind of each layer, from a list of names or a text of letters; the list counts if both are given."""
    key = _layers_key(c)
    listed, names = key != PATTERN, {**LETTERS}
    if listed:
        names = {name: OLD_KINDS.get(name, name) for name in (*LETTERS.values(), *OLD_KINDS)}
    given = c.values[key] if c.is_given(key) else None
    c.is_given(PATTERN)  # counts as read where the list is used
    if not isinstance(given, list if listed else str) or not 0 < len(given) <= MOST_LAYERS:
        kinds = ", ".join(LETTERS.values())
        c.refuse(key, f"implemented: a list of {kinds} as layers_block_type, or a pattern of {', '.join(LETTERS)}")
    other = next((one for one in given if not isinstance(one, str) or one not in names), None)
    if other is not None:
        c.refuse(key, f"implemented: layers of {', '.join(names)}")
    return [names[one] for one in given]


def _recurrent(c: JsonFields, layers: tuple[int, ...]) -> RecurrentConfig | None:
    """Reads the sizes of Mamba-2; None: there are no such layers."""
    heads = c.integer("mamba_num_heads", most=MOST_HEADS, default=128)
    groups = c.integer("n_groups", most=MOST_HEADS, default=8)
    if heads % groups:
        c.refuse("n_groups", f"it must divide mamba_num_heads, which is {heads}")
    c.only("mamba_hidden_act", ("silu", "swish"), "silu")
    refuse_step_limits(c)
    found = RecurrentConfig(
        layers, kernel=c.integer("conv_kernel", least=2, most=MOST_TAPS, default=4), key_heads=groups,
        value_heads=heads, key_dim=c.integer("ssm_state_size", most=WIDEST, default=128),
        value_dim=c.integer("mamba_head_dim", most=WIDEST, default=64), scan=True,
        conv_bias=c.boolean("use_conv_bias", True), projection_bias=c.boolean("use_bias", False),
    )  # fmt: skip
    return found if layers else None


def _experts(c: JsonFields, kinds: list[str]) -> ExpertsConfig | None:
    """Reads the experts; None: there are no such layers."""
    if MOE not in kinds:
        for key in EXPERT_KEYS:  # they count as read, whatever they say
            c.is_given(key)
        return None
    c.only("mlp_bias", (False,), False)
    named = c.with_defaults({"n_routed_experts": 8})
    inner = c.integer("moe_intermediate_size", most=WIDEST, default=7688)
    made = experts_of(
        named, "n_routed_experts", 2, inner=inner, normalise=c.boolean("norm_topk_prob", True),
        dense=tuple(i for i, kind in enumerate(kinds) if kind != MOE),
    )  # fmt: skip
    groups, taking = c.integer("n_group", default=1), c.integer("topk_group", default=1)
    if made.count % groups or (groups > 1 and made.count < 2 * groups):
        c.refuse("n_group", f"it must divide n_routed_experts, which is {made.count}, into groups of two or more")
    if taking > groups or made.top > taking * (made.count // groups):
        c.refuse("topk_group", f"implemented: at most n_group, {groups}, with num_experts_per_tok experts or more")
    scale = c.number("routed_scaling_factor", 0, 1e6, 1.0, above=True)
    return replace(
        made, plain=True, sigmoid=SigmoidRouting(scale, groups, taking), shared_name=".shared_experts",
        shared=c.integer("moe_shared_expert_intermediate_size", most=WIDEST, default=7688),
        latent=c.integer("moe_latent_size", most=WIDEST) if c.is_given("moe_latent_size") else 0,
    )  # fmt: skip


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads the keys of transformers' NemotronHConfig."""
    for name in OTHER_NAMES:
        if c.is_given(name):
            c.refuse(name, "implemented: the names that transformers writes, such as n_groups and conv_kernel")
    c.only("attention_bias", (False,), False)
    c.only("residual_in_fp32", (False,), False)
    c.only("sliding_window", (None,), None)
    kinds = _layer_kinds(c)
    if FULL not in kinds:
        c.refuse(_layers_key(c), "implemented: attention in some layer")
    scans, dense = (tuple(i for i, kind in enumerate(kinds) if kind in some) for some in ((SCAN,), (MLP, MOE)))
    named = c.with_defaults({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8})
    return ParsedConfig(TextConfig(
        **heads_of(named, default=128)._asdict(),
        layers=len(kinds),
        intermediate=c.integer("intermediate_size", most=WIDEST, default=21504),
        vocab=c.integer("vocab_size", most=WIDEST, default=131072),
        eps=c.number("layer_norm_epsilon", 0, 1, 1e-5, above=True),
        rope_theta=1.0,
        max_positions=c.integer("max_position_embeddings", default=4096),
        tied=tied,
        qkv_bias=False,
        mlp_bias=c.boolean("mlp_bias", False),
        mlp=PLAIN,
        activation=activation_of(c, "mlp_hidden_act", "relu2"),
        rotary=False,
        recurrent=_recurrent(c, scans),
        mlp_layers=dense,
        experts=_experts(c, kinds),
    ))  # fmt: skip


STACK = {"embeddings.": "embed_tokens.", "norm_f.": "norm.", "": ""}
"""Names of the decoder's parts behind ``backbone.`` or ``model.``, or alone -> canonical ones."""

MLP_PARTS = (
    "up_proj", "down_proj", "experts", "gate", "shared_experts", "fc1_latent_proj", "fc2_latent_proj",
)  # fmt: skip
"""Modules of MLPs and experts among those of a layer, which is called ``mixer`` whatever it is."""

NAMES = (
    (".mixer.norm.", ".linear_attn.gated_norm."), (".norm.", ".input_layernorm."), (".gated_norm.", ".norm."),
    *((f".mixer.{one}_proj.", f".self_attn.{one}_proj.") for one in "qkvo"),
    *((f".mixer.{one}.", f".mlp.{one}.") for one in MLP_PARTS), (".mixer.", ".linear_attn."),
)  # fmt: skip

FAMILY = Family(
    name="Nemotron-H, Nemotron-3",
    model_type="nemotron_h",
    architectures={"NemotronHForCausalLM": GENERATE, "NemotronHModel": BARE},
    config=describe,
    names=StoredNames(
        {f"{outer}{a}": b for outer in ("backbone.", "model.") for a, b in STACK.items()}
        | {"lm_head.": "lm_head."} | STACK,
        NAMES,
    ),
    ignored=frozenset({
        "chunk_size", "expand", "hidden_dropout", "mamba_proj_bias", "mamba_ssm_cache_dtype", "mtp_layers_block_type",
        "mtp_hybrid_override_pattern", "num_hidden_layers", "num_logits_to_keep", "num_nextn_predict_layers",
        "output_router_logits", "rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min",
        "use_mamba_kernels", "n_shared_experts", "moe_shared_expert_overlap", "rope_theta", "partial_rotary_factor",
        "rope_scaling",
    }),
    skipped=("mtp.",),
    adapters=HYBRID,
)  # fmt: skip
