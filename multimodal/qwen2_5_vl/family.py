"""Qwen2.5-VL as a family: Qwen2's decoder with rotary positions on three axes, and the tower's configuration."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import (
    MOST_HEADS,
    MOST_LAYERS,
    WIDEST,
    full_attention,
    gated_decoder,
    heads_of,
)
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.checkpoint.model_config import VisionConfig
from trencadis.core.checkpoint.rope_config import LARGEST_BASE
from trencadis.core.layout import CHANNELS, FACTOR, MERGE, PATCH, TEMPORAL, WINDOW_CELLS
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide

SILU = ("silu", "swish")
MEDIA_TOKENS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Qwen2_5_VLConfig, flat as on the hub or nested."""
    full_attention(c)
    heads = heads_of(c, whole=True)
    text = gated_decoder(c, heads, tied, positions=32768, theta=1e6, axes=True, qkv_bias=True)
    vision = _vision(root.within("vision_config"), text.hidden)
    media = {key: _token(root, key, default, text.vocab) for key, default in MEDIA_TOKENS.items()}
    if media["image_token_id"] == media["video_token_id"]:
        root.refuse("image_token_id", "it must differ from video_token_id")
    return Described(text, vision, media)


def _token(root: Fields, key: str, default: int, vocab: int) -> int:
    """A token's id; -1 if the key is missing and the default lies beyond the vocabulary."""
    if key in root.values:
        return root.integer(key, 0, vocab - 1)
    return default if default < vocab else -1


def _vision(c: Fields, text_hidden: int) -> VisionConfig:
    c.only("hidden_act", SILU, "silu")
    # The size of a patch, of a merge cell and of a window are built into packing, buckets and kernels.
    c.only("patch_size", (PATCH,), PATCH)
    c.only("temporal_patch_size", (TEMPORAL,), TEMPORAL)
    c.only("spatial_merge_size", (MERGE,), MERGE)
    c.only("in_channels", (CHANNELS,), CHANNELS)
    window = WINDOW_CELLS * FACTOR
    if c.integer("window_size", default=window) // FACTOR != WINDOW_CELLS:
        c.refuse("window_size", f"implemented: windows of {window} pixels")
    hidden, heads = c.integer("hidden_size", most=WIDEST), c.integer("num_heads", most=MOST_HEADS)
    if hidden % (4 * heads):
        c.refuse("num_heads", f"implemented: heads whose size is a multiple of 4, and hidden_size is {hidden}")
    out_hidden = c.integer("out_hidden_size", most=WIDEST, default=text_hidden)
    if out_hidden != text_hidden:
        c.refuse("out_hidden_size", f"it must be the text model's hidden_size, which is {text_hidden}")
    depth = c.integer("depth", most=MOST_LAYERS)
    # transformers reads these keys as aliases.
    for alias, value in (("num_attention_heads", heads), ("num_hidden_layers", depth), ("head_dim", hidden // heads)):
        if c.given(alias):
            c.only(alias, (value,))
    return VisionConfig(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST),
        out_hidden=out_hidden,
        full_layers=c.integers("fullatt_block_indexes", -MOST_LAYERS, MOST_LAYERS),
        tokens_per_second=c.number("tokens_per_second", 0, 10000, 4),
        rope_theta=_vision_theta(c),
    )


def _vision_theta(c: Fields) -> float:
    rope = c.within("rope_scaling" if c.values.get("rope_scaling") else "rope_parameters")
    for key in ("rope_type", "type"):
        if key in rope.values:
            rope.only(key, ("axial", "default"))
    place = rope if "rope_theta" in rope.values else c
    return place.number("rope_theta", 0, LARGEST_BASE, 10000.0, above=True)


FAMILY = Family(
    name="Qwen2.5-VL",
    model_type="qwen2_5_vl",
    architectures={"Qwen2_5_VLForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(
        {
            "model.visual.": "visual.",
            "visual.": "visual.",
            "model.language_model.": "",
            "model.": "",
            "lm_head.": "lm_head.",
        }
    ),
    make="trencadis.multimodal.qwen2_5_vl.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.images.needs:image_needs",
        expand="trencadis.multimodal.qwen2_5_vl.placeholders:expand_placeholders",
        positions="trencadis.multimodal.qwen2_5_vl.mrope:mrope_positions",
    ),
    defaults={"fp32_softmax": True},
)
