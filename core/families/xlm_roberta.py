"""XLM-RoBERTa: BERT's encoder.

Positions start after the row of the padding id; the class head has other stored names.
"""

from __future__ import annotations

from trencadis.core.checkpoint.family import BARE, CLASSIFY, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.pooling_config import FIRST
from trencadis.core.families.bert import DROPPED, INNER, PARTS, TANH, encoder


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' XLMRobertaConfig."""
    pad = c.integer("pad_token_id", least=0, default=1)
    return ParsedConfig(encoder(c, tied, offset=pad + 1, pad=pad))


FAMILY = Family(
    name="XLM-RoBERTa",
    model_type="xlm-roberta",
    architectures={"XLMRobertaModel": BARE, "XLMRobertaForSequenceClassification": CLASSIFY},
    config=describe,
    names=StoredNames(
        {f"{at}{theirs}": ours for at in ("roberta.", "") for theirs, ours in PARTS.items()}
        | {"classifier.dense.": "score_dense.", "classifier.out_proj.": "score."},
        INNER,
    ),
    pooling=FIRST,
    heads={"XLMRobertaForSequenceClassification": TANH},
    tied=True,
    ignored=DROPPED,
)
