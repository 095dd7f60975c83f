"""OPT: layer norms, learned positions, plain MLPs.

The 350m model has its norms after the residual sums, and embedding tables narrower than the hidden size.
"""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.family import BARE, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import LAYER, PLAIN, POST, PRE, TextConfig

EPS = 1e-5
"""Epsilon of every norm; no configuration has another value."""

OFFSET = 2
"""Row of position 0 in the position table."""

DECODERS = ("model.decoder.", "decoder.", "")


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' OPTConfig."""
    hidden = c.integer("hidden_size", most=WIDEST, default=768)
    heads = c.integer("num_attention_heads", most=MOST_HEADS, default=12)
    if hidden % (2 * heads):
        c.refuse("num_attention_heads", f"implemented: heads of an even size, and hidden_size is {hidden}")
    c.only("layer_norm_elementwise_affine", (True,), True)
    before = c.boolean("do_layer_norm_before", True)
    most = c.integer("max_position_embeddings", default=2048)
    without = c.boolean("_remove_final_layer_norm", False)
    biases = c.boolean("enable_bias", True)
    table = c.integer("word_embed_proj_dim", most=WIDEST) if c.is_given("word_embed_proj_dim") else hidden
    return ParsedConfig(
        TextConfig(
            hidden=hidden,
            layers=c.integer("num_hidden_layers", most=MOST_LAYERS, default=12),
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            intermediate=c.integer("ffn_dim", most=WIDEST, default=3072),
            vocab=c.integer("vocab_size", most=WIDEST, default=50272),
            eps=EPS,
            rope_theta=1.0,
            max_positions=most,
            tied=tied,
            qkv_bias=biases,
            out_bias=biases,
            mlp_bias=biases,
            norm=LAYER,
            norm_placement=PRE if before else POST,
            final_norm=before and not without,
            mlp=PLAIN,
            activation=activation_of(c, "activation_function", "relu"),
            rotary=False,
            table=0 if table == hidden else table,
            learned=most + OFFSET,
            position_offset=OFFSET,
        )
    )


FAMILY = Family(
    name="OPT",
    model_type="opt",
    architectures={"OPTForCausalLM": GENERATE, "OPTModel": BARE},
    config=describe,
    names=StoredNames(
        {"lm_head.": "lm_head.", "score.": "score."}
        | {f"{at}final_layer_norm.": "norm." for at in DECODERS}
        | dict.fromkeys(DECODERS, ""),
        (
            (".self_attn.out_proj.", ".self_attn.o_proj."),
            (".self_attn_layer_norm.", ".input_layernorm."),
            (".final_layer_norm.", ".post_attention_layernorm."),
            (".fc1.", ".mlp.up_proj."),
            (".fc2.", ".mlp.down_proj."),
        ),
    ),
    tied=True,
    ignored=frozenset({"activation_dropout", "dropout", "init_std", "layerdrop"}),
)
