"""Qwen3.5 and 3.6 with experts, and Qwen3-Next: recurrent layers, and a shared expert with a gate beside the others."""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.decoder_fields import WIDEST, experts_of
from trencadis.core.checkpoint.family import BARE, GENERATE, Family, ParsedConfig, StoredNames
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.families.qwen3_5 import IGNORED, PREFIXES, SKIPPED, read_decoder
from trencadis.core.families.qwen3_moe import dense_layers

ROUTING = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Keys of the loss, and of an output that is not served."""


def read_expert_decoder(c: JsonFields, tied: bool) -> TextConfig:
    """Reads a decoder whose layers all have experts; the weights of a token's experts are divided by their sum."""
    inner = c.integer("moe_intermediate_size", most=WIDEST, default=512)
    text = read_decoder(c.with_defaults({"intermediate_size": inner}), tied)
    experts = experts_of(c.with_defaults({"num_experts": 256}), "num_experts", 8, inner=inner, normalise=True)
    return replace(text, experts=replace(experts, shared=_read_shared(c), shared_gate=True))


def _read_shared(c: JsonFields) -> int:
    """Reads the columns of the shared expert."""
    return c.integer("shared_expert_intermediate_size", most=WIDEST, default=512)


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3_5MoeTextConfig."""
    return ParsedConfig(read_expert_decoder(c, tied))


def describe_next(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3NextConfig: one axis of positions, and layers that may have one MLP."""
    text = read_decoder(c.with_defaults({"intermediate_size": 5632}), tied, axes=False)
    experts = experts_of(
        c.with_defaults({"num_experts": 512}),
        "num_experts",
        10,
        inner=c.integer("moe_intermediate_size", most=WIDEST, default=512),
        normalise=c.boolean("norm_topk_prob", True),
        dense=dense_layers(c, text.layers),
    )
    experts = replace(experts, shared=_read_shared(c), shared_gate=True)
    assert text.recurrent is not None
    some = experts if len(experts.dense) < text.layers else None
    return ParsedConfig(replace(text, experts=some, recurrent=replace(text.recurrent, interleaved=True)))


FAMILY = Family(
    name="Qwen3.5 with experts",
    model_type="qwen3_5_moe_text",
    architectures={"Qwen3_5MoeForCausalLM": GENERATE, "Qwen3_5MoeTextModel": BARE},
    config=describe,
    names=StoredNames(PREFIXES),
    ignored=IGNORED | ROUTING,
    skipped=SKIPPED,
    adapters=(),
)
NEXT = replace(
    FAMILY,
    name="Qwen3-Next",
    model_type="qwen3_next",
    architectures={"Qwen3NextForCausalLM": GENERATE, "Qwen3NextModel": BARE},
    config=describe_next,
)
