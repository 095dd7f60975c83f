"""Qwen3-VL as families: Qwen3's decoder, dense or with experts, and a tower whose layers reach into the decoder's."""

from __future__ import annotations

import math
from dataclasses import replace

from trencadis.core.checkpoint.decoder_fields import (
    MOST_LAYERS,
    WIDEST,
    activation_of,
    experts_of,
    full_attention,
    gated_decoder,
    heads_of,
)
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.families.qwen3_moe import dense_layers
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.deep.config import CHANNELS, FRAMES, DeepTower
from trencadis.multimodal.qwen2_vl.config_fields import PREFIXES, aliases, axial_theta, widths
from trencadis.multimodal.qwen2_vl.media_tokens import NAMES, media_tokens

SECTIONS = (24, 20, 20)
PATCH, MERGE = 16, 2
"""Pixels along a side of a patch, patches along a side of a cell."""
THETA = 500_000.0


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Qwen3VLConfig."""
    return _described(root, _text(root, c, 128))


def describe_experts(root: Fields, c: Fields, tied: bool) -> Described:
    """Qwen3VLMoeConfig."""
    text = _text(root, c, 0)
    # The hub's name of their number, and the one that transformers 5 writes.
    hub, saved = c.given("num_experts"), c.given("num_local_experts")
    experts = experts_of(
        c,
        "num_local_experts" if saved or not hub else "num_experts",
        4,
        inner=c.integer("moe_intermediate_size", most=WIDEST, default=1408),
        normalise=True,
        dense=dense_layers(c, text.layers),
    )
    return _described(root, replace(text, experts=experts if len(experts.dense) < text.layers else None))


def _text(root: Fields, c: Fields, head: int) -> TextConfig:
    """The decoder; ``head``: default size of a head. The root alone says whether the head is tied."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    full_attention(c)
    bias, tied = c.boolean("attention_bias", False), root.boolean("tie_word_embeddings", False)
    return gated_decoder(
        c, heads_of(c, default=head), tied, positions=128_000, theta=THETA, axes=True, sections=SECTIONS,
        qkv_bias=bias, out_bias=bias, qk_norm=True, interleaved=True,
    )  # fmt: skip


def _described(root: Fields, text: TextConfig) -> Described:
    return Described(text, _vision(root.within("vision_config"), text.hidden), media_tokens(root, text.vocab))


def _vision(c: Fields, text_hidden: int) -> DeepTower:
    for key, value in (
        ("patch_size", PATCH), ("temporal_patch_size", FRAMES), ("spatial_merge_size", MERGE),
        ("in_channels", CHANNELS),
    ):  # fmt: skip
        c.only(key, (value,), value)
    hidden, heads, out_hidden = widths(c.over({"out_hidden_size": 3584}), "hidden_size", "out_hidden_size", text_hidden)
    depth = c.integer("depth", most=MOST_LAYERS, default=27)
    aliases(c, depth, heads, hidden)
    positions = c.integer("num_position_embeddings", most=WIDEST, default=2304)
    side = math.isqrt(positions)
    if side**2 != positions:
        c.refuse("num_position_embeddings", "it must be a square")
    key = "deepstack_visual_indexes"
    deep = c.integers(key, most=depth - 1) if key in c.values else (8, 16, 24)
    if list(deep) != sorted(set(deep)) or (deep and deep[-1] >= depth):
        c.refuse(key, f"implemented: some of the {depth} layers, ascending")
    return DeepTower(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=4304),
        out_hidden=out_hidden,
        side=side,
        deep_layers=deep,
        activation=activation_of(c, "hidden_act", "gelu_pytorch_tanh"),
        rope_theta=axial_theta(c),
        patch=PATCH,
        merge=MERGE,
    )


SIDE = VisionSide(
    needs="trencadis.multimodal.qwen3_vl.pictures:needs",
    sizes="trencadis.multimodal.qwen3_vl.pictures:sizes",
    processor="trencadis.multimodal.qwen3_vl.pictures:processor",
    tokens=NAMES,
    expand="trencadis.multimodal.videos.spoken:expand_apart",
    positions="trencadis.multimodal.qwen3_vl.pictures:apart_positions",
    times="trencadis.multimodal.videos.spoken:spoken_times",
)
INNER = ((".mlp.linear_fc1.", ".mlp.up_proj."), (".mlp.linear_fc2.", ".mlp.down_proj."))
DENSE = Family(
    name="Qwen3-VL",
    model_type="qwen3_vl",
    architectures={"Qwen3VLForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, INNER),
    make="trencadis.multimodal.qwen3_vl.model:make",
    vision=SIDE,
)
EXPERTS = Family(
    name="Qwen3-VL with experts",
    model_type="qwen3_vl_moe",
    architectures={"Qwen3VLMoeForConditionalGeneration": GENERATE},
    config=describe_experts,
    names=StoredNames(PREFIXES, INNER, transposed=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    make="trencadis.multimodal.qwen3_vl.model:make",
    vision=SIDE,
    ignored=frozenset({"norm_topk_prob", "output_router_logits", "router_aux_loss_coef"}),
)
