"""BERT, an encoder: bidirectional attention, norms after the residual sums, and a norm after the embeddings.

XLM-RoBERTa has the same encoder. Its positions start after the row of the padding id; the class head has other stored
names.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import MOST_HEADS, MOST_LAYERS, WIDEST, activation_of
from trencadis.core.checkpoint.family import BARE, CLASSIFY, ClassHead, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import LAYER, PLAIN, POST, TextConfig
from trencadis.core.checkpoint.pooling_description import FIRST

TANH = ClassHead(FIRST, "tanh", biased=True)
"""The class head of this family: the first token's hidden state through a dense layer, tanh, and a linear layer."""

PARTS = {
    "embeddings.word_embeddings.": "embed_tokens.",
    "embeddings.position_embeddings.": "embed_positions.",
    "embeddings.token_type_embeddings.": "embed_types.",
    "embeddings.LayerNorm.": "embed_norm.",
    "encoder.layer.": "layers.",
}
INNER = (
    (".attention.self.query.", ".self_attn.q_proj."),
    (".attention.self.key.", ".self_attn.k_proj."),
    (".attention.self.value.", ".self_attn.v_proj."),
    (".attention.output.dense.", ".self_attn.o_proj."),
    (".attention.output.LayerNorm.", ".input_layernorm."),
    (".intermediate.dense.", ".mlp.up_proj."),
    (".output.dense.", ".mlp.down_proj."),
    (".output.LayerNorm.", ".post_attention_layernorm."),
)
DROPPED = frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob", "output_past"})
"""Keys that matter only in training."""


def encoder(c: JsonFields, tied: bool, *, offset: int = 0, pad: int = -1) -> TextConfig:
    """Reads BertConfig and configurations with the same keys.

    Args:
        offset: row of position 0 in the position table.
        pad: the token id that takes no position; -1: none.
    """
    hidden = c.integer("hidden_size", most=WIDEST, default=768)
    heads = c.integer("num_attention_heads", most=MOST_HEADS, default=12)
    if hidden % (2 * heads):
        c.refuse("num_attention_heads", f"implemented: heads of an even size, and hidden_size is {hidden}")
    c.only("position_embedding_type", ("absolute", None), "absolute")
    c.only("is_decoder", (False,), False)
    c.only("add_cross_attention", (False,), False)
    rows = c.integer("max_position_embeddings", default=512)
    if rows <= offset:
        c.refuse("max_position_embeddings", f"it must be above {offset}, the row of the first position")
    return TextConfig(
        hidden=hidden,
        layers=c.integer("num_hidden_layers", most=MOST_LAYERS, default=12),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=3072),
        vocab=c.integer("vocab_size", most=WIDEST, default=30522),
        eps=c.number("layer_norm_eps", 0, 1, 1e-12, above=True),
        rope_theta=1.0,
        max_positions=rows - offset,
        tied=tied,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm=LAYER,
        norm_placement=POST,
        final_norm=False,
        mlp=PLAIN,
        activation=activation_of(c, "hidden_act", "gelu"),
        rotary=False,
        learned=rows,
        position_offset=offset,
        causal=False,
        types=c.integer("type_vocab_size", most=2**16, default=2),
        pad=pad,
    )


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' BertConfig."""
    return ParsedConfig(encoder(c, tied))


FAMILY = Family(
    name="BERT",
    model_type="bert",
    architectures={"BertModel": BARE, "BertForSequenceClassification": CLASSIFY},
    config=describe,
    names=StoredNames(
        {f"{at}{theirs}": ours for at in ("bert.", "") for theirs, ours in PARTS.items()}
        | {"bert.pooler.dense.": "score_dense.", "pooler.dense.": "score_dense.", "classifier.": "score."},
        INNER,
    ),
    pooling=FIRST,
    heads={"BertForSequenceClassification": TANH},
    tied=True,
    ignored=DROPPED,
)


def describe_xlm_roberta(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' XLMRobertaConfig."""
    pad = c.integer("pad_token_id", least=0, default=1)
    return ParsedConfig(encoder(c, tied, offset=pad + 1, pad=pad))


XLM_ROBERTA = replace(
    FAMILY,
    name="XLM-RoBERTa",
    model_type="xlm-roberta",
    architectures={"XLMRobertaModel": BARE, "XLMRobertaForSequenceClassification": CLASSIFY},
    config=describe_xlm_roberta,
    names=StoredNames(
        {f"{at}{theirs}": ours for at in ("roberta.", "") for theirs, ours in PARTS.items()}
        | {"classifier.dense.": "score_dense.", "classifier.out_proj.": "score."},
        INNER,
    ),
    heads={"XLMRobertaForSequenceClassification": TANH},
)
