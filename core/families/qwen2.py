"""Qwen2 and Qwen2.5: biases on q, k and v alone."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import gated_decoder, heads_of, some_windows
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.families.llama import PREFIXES
from trencadis.core.models.family import BARE, CLASSIFY, GENERATE, Described, Family, StoredNames


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Qwen2Config."""
    windows = some_windows(c)._asdict()
    return Described(gated_decoder(c, heads_of(c), tied, positions=32768, qkv_bias=True, **windows))


FAMILY = Family(
    name="Qwen2 and Qwen2.5",
    model_type="qwen2",
    architectures={"Qwen2ForCausalLM": GENERATE, "Qwen2ForSequenceClassification": CLASSIFY, "Qwen2Model": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
    defaults={"fp32_softmax": True, "block_adjustment": False},
)
