"""Qwen2 and Qwen2.5: biases on q, k and v only. Reward models have a head of two linear layers for every token."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import gated_decoder, heads_of, some_windows
from trencadis.core.checkpoint.family import BARE, CLASSIFY, GENERATE, ClassHead, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.pooling_config import ALL, IDENTITY, SOFTMAX
from trencadis.core.families.llama import PREFIXES

REWARD = ClassHead(ALL, "relu", biased=True, classes=1, activation=IDENTITY)
STEPS = ClassHead(ALL, "relu", biased=True, classes=2, activation=SOFTMAX, step_tag=151651)
"""The head of process reward models, which score the token <extra_0> at the end of each solution step."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen2Config."""
    windows = some_windows(c)._asdict()
    return ParsedConfig(gated_decoder(c, heads_of(c), tied, positions=32768, qkv_bias=True, **windows))


FAMILY = Family(
    name="Qwen2 and Qwen2.5",
    model_type="qwen2",
    architectures={
        "Qwen2ForCausalLM": GENERATE,
        "Qwen2ForSequenceClassification": CLASSIFY,
        "Qwen2ForRewardModel": CLASSIFY,
        "Qwen2ForProcessRewardModel": CLASSIFY,
        "Qwen2Model": BARE,
    },
    config=describe,
    names=StoredNames({"score.0.": "score_dense.", "score.2.": "score."} | PREFIXES),
    heads={"Qwen2ForRewardModel": REWARD, "Qwen2ForProcessRewardModel": STEPS},
    defaults={"fp32_softmax": True, "block_adjustment": False},
)
