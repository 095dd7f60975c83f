"""GPT-2: layer norms, learned positions, plain MLPs; matrices are stored as [in, out], with q, k and v fused."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.family import BARE, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import LAYER, PLAIN, TextConfig

PARTS = {"h.": "layers.", "wte.": "embed_tokens.", "wpe.": "embed_positions.", "ln_f.": "norm."}


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' GPT2Config."""
    hidden = c.integer("n_embd", most=WIDEST, default=768)
    heads = c.integer("n_head", most=MOST_HEADS, default=12)
    if hidden % (2 * heads):
        c.refuse("n_head", f"implemented: heads of an even size, and n_embd is {hidden}")
    c.only("scale_attn_by_inverse_layer_idx", (False,), False)
    c.only("add_cross_attention", (False,), False)
    most = c.integer("n_positions", default=1024)
    return ParsedConfig(
        TextConfig(
            hidden=hidden,
            layers=c.integer("n_layer", most=MOST_LAYERS, default=12),
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            intermediate=c.integer("n_inner", most=WIDEST) if c.is_given("n_inner") else 4 * hidden,
            vocab=c.integer("vocab_size", most=WIDEST, default=50257),
            eps=c.number("layer_norm_epsilon", 0, 1, 1e-5, above=True),
            rope_theta=1.0,
            max_positions=most,
            tied=tied,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            norm=LAYER,
            mlp=PLAIN,
            activation=activation_of(c, "activation_function", "gelu_new"),
            rotary=False,
            scale=0.0 if c.boolean("scale_attn_weights", True) else 1.0,
            learned=most,
        )
    )


FAMILY = Family(
    name="GPT-2",
    model_type="gpt2",
    architectures={"GPT2LMHeadModel": GENERATE, "GPT2Model": BARE},
    config=describe,
    names=StoredNames(
        {"lm_head.": "lm_head.", "score.": "score."} | {f"transformer.{a}": b for a, b in PARTS.items()} | PARTS,
        (
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".attn.c_attn.", ".self_attn.qkv_proj."),
            (".attn.c_proj.", ".self_attn.o_proj."),
            (".mlp.c_fc.", ".mlp.up_proj."),
            (".mlp.c_proj.", ".mlp.down_proj."),
        ),
        transposed=("qkv_proj", "o_proj", "up_proj", "down_proj"),
    ),
    tied=True,
    ignored=frozenset(
        {
            "attn_pdrop", "embd_pdrop", "n_ctx", "reorder_and_upcast_attn", "resid_pdrop", "summary_activation",
            "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        }
    ),
)  # fmt: skip
