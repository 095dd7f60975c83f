"""The Qwen3-VL families, and Qwen3.5, 3.6 and 3.8 with images; each dense or with experts. Torch-free.

Qwen3-VL has Qwen3's decoder and a DeepStack tower, whose outputs are also added in decoder layers. Qwen3.5 has a
decoder with recurrent layers (``core.family_configs.qwen3_5``) and the tower without DeepStack.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trencadis.core.checkpoint.decoder_config_parsers import (
    MOST_LAYERS,
    WIDEST,
    activation_of,
    experts_of,
    full_attention,
    gated_decoder,
    heads_of,
)
from trencadis.core.checkpoint.family import (
    ATTENTION,
    EVERY_PART,
    GENERATE,
    RECURRENT,
    TOWER,
    Family,
    ParsedConfig,
    StoredNames,
    VisionSide,
)
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.family_configs.qwen3 import dense_layers
from trencadis.core.family_configs.qwen3_5 import IGNORED, ROUTING, SKIPPED, read_decoder, read_expert_decoder
from trencadis.multimodal.qwen2_vl.qwen_vl_hf_config import (
    PREFIXES,
    TOKEN_NAMES,
    check_aliases,
    read_media_tokens,
    read_rope_theta,
    read_widths,
)
from trencadis.multimodal.qwen3_vl.config import CHANNELS, FRAMES, DeepStackVisionConfig

MROPE_SECTION = (24, 20, 20)
PATCH, MERGE = 16, 2
"""Pixels along a side of a patch, patches along a side of a cell."""
DEFAULT_ROPE_THETA = 500_000.0
DEEPSTACK = (8, 16, 24)
"""Layers whose outputs Qwen3-VL's decoder adds, unless the file names others."""


def describe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3VLConfig."""
    return _describe_config(root, _read_text(root, c, 128))


def describe_experts(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3VLMoeConfig."""
    text = _read_text(root, c, 0)
    # The key of their number in the hub's files, and the one that transformers 5 writes.
    hub, saved = c.is_given("num_experts"), c.is_given("num_local_experts")
    experts = experts_of(
        c,
        "num_local_experts" if saved or not hub else "num_experts",
        4,
        inner=c.integer("moe_intermediate_size", most=WIDEST, default=1408),
        normalise=True,
        dense=dense_layers(c, text.layers),
    )
    return _describe_config(root, replace(text, experts=experts if len(experts.dense) < text.layers else None))


def _read_text(root: JsonFields, c: JsonFields, head: int) -> TextConfig:
    """Reads the decoder; ``head``: default size of a head. Only the root's key decides if the head is tied."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    full_attention(c)
    bias, tied = c.boolean("attention_bias", False), root.boolean("tie_word_embeddings", False)
    return gated_decoder(
        c, heads_of(c, default=head), tied, positions=128_000, theta=DEFAULT_ROPE_THETA, axes=True,
        sections=MROPE_SECTION,
        qkv_bias=bias, out_bias=bias, qk_norm=True, interleaved=True,
    )  # fmt: skip


def _describe_config(root: JsonFields, text: TextConfig) -> ParsedConfig:
    return ParsedConfig(
        text, read_vision(root.within("vision_config"), text.hidden, DEEPSTACK), read_media_tokens(root, text.vocab)
    )


def read_vision(c: JsonFields, text_hidden: int, deepstack: tuple[int, ...]) -> DeepStackVisionConfig:
    """Reads the tower; ``deepstack``: default of ``deepstack_visual_indexes``."""
    for key, value in (
        ("patch_size", PATCH), ("temporal_patch_size", FRAMES), ("spatial_merge_size", MERGE),
        ("in_channels", CHANNELS),
    ):  # fmt: skip
        c.only(key, (value,), value)
    hidden, heads, out_hidden = read_widths(
        c.with_defaults({"out_hidden_size": 3584}), "hidden_size", "out_hidden_size", text_hidden
    )
    depth = c.integer("depth", most=MOST_LAYERS, default=27)
    check_aliases(c, depth, heads, hidden)
    positions = c.integer("num_position_embeddings", most=WIDEST, default=2304)
    side = math.isqrt(positions)
    if side**2 != positions:
        c.refuse("num_position_embeddings", "it must be a square")
    key = "deepstack_visual_indexes"
    deepstack_layers = c.integers(key, most=depth - 1) if key in c.values else deepstack
    if list(deepstack_layers) != sorted(set(deepstack_layers)) or (deepstack_layers and deepstack_layers[-1] >= depth):
        c.refuse(key, f"implemented: some of the {depth} layers, ascending")
    return DeepStackVisionConfig(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST, default=4304),
        out_hidden=out_hidden,
        side=side,
        deepstack_layers=deepstack_layers,
        activation=activation_of(c, "hidden_act", "gelu_pytorch_tanh"),
        rope_theta=read_rope_theta(c),
        patch=PATCH,
        merge=MERGE,
    )


VISION_SIDE = VisionSide(
    needs="trencadis.multimodal.qwen3_vl.processor:PATCH_SCHEME.load_needs",
    sizes="trencadis.multimodal.qwen3_vl.processor:PATCH_SCHEME.load_resize_rule",
    processor="trencadis.multimodal.qwen3_vl.processor:load_processor",
    tokens=TOKEN_NAMES,
    expand="trencadis.multimodal.placeholders:expand_with_timestamps",
    positions="trencadis.multimodal.qwen2_vl.mrope:mrope_positions_by_frames",
    times="trencadis.multimodal.placeholders:format_timestamps",
)
WEIGHT_NAMES = ((".mlp.linear_fc1.", ".mlp.up_proj."), (".mlp.linear_fc2.", ".mlp.down_proj."))
DENSE = Family(
    name="Qwen3-VL",
    model_type="qwen3_vl",
    architectures={"Qwen3VLForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, WEIGHT_NAMES),
    make="trencadis.multimodal.qwen3_vl.model:make",
    vision=VISION_SIDE,
    adapters=EVERY_PART,
)
EXPERTS = Family(
    name="Qwen3-VL with experts",
    model_type="qwen3_vl_moe",
    architectures={"Qwen3VLMoeForConditionalGeneration": GENERATE},
    config=describe_experts,
    names=StoredNames(PREFIXES, WEIGHT_NAMES, transposed=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    make="trencadis.multimodal.qwen3_vl.model:make",
    vision=VISION_SIDE,
    ignored=frozenset({"norm_topk_prob", "output_router_logits", "router_aux_loss_coef"}),
    adapters=(ATTENTION, TOWER),
)


MEDIA_IDS = {
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
}  # fmt: skip
"""Defaults of transformers' Qwen3_5Config."""


def describe_qwen3_5(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3_5Config, whose file has no key for DeepStack. Only the root's key ties the head."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    return _describe_qwen3_5(root, read_decoder(c, root.boolean("tie_word_embeddings", False)))


def describe_qwen3_5_moe(root: JsonFields, c: JsonFields, tied: bool) -> ParsedConfig:
    """Reads transformers' Qwen3_5MoeConfig."""
    if c is root:
        root.refuse("text_config", "it must be an object")
    return _describe_qwen3_5(root, read_expert_decoder(c, root.boolean("tie_word_embeddings", False)))


def _describe_qwen3_5(root: JsonFields, text: TextConfig) -> ParsedConfig:
    vision = read_vision(root.within("vision_config"), text.hidden, ())
    return ParsedConfig(text, vision, read_media_tokens(root, text.vocab, MEDIA_IDS))


QWEN3_5 = Family(
    name="Qwen3.5 with images",
    model_type="qwen3_5",
    architectures={"Qwen3_5ForConditionalGeneration": GENERATE},
    config=describe_qwen3_5,
    names=StoredNames(PREFIXES, WEIGHT_NAMES),
    make="trencadis.multimodal.qwen3_vl.model:make",
    vision=VISION_SIDE,
    ignored=IGNORED,
    skipped=SKIPPED,
    adapters=(*EVERY_PART, RECURRENT),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3.5 with experts and images",
    model_type="qwen3_5_moe",
    architectures={"Qwen3_5MoeForConditionalGeneration": GENERATE},
    config=describe_qwen3_5_moe,
    ignored=IGNORED | ROUTING,
    adapters=(ATTENTION, TOWER, RECURRENT),
)
