"""Qwen2-VL (and QVQ) as a family: Qwen2's decoder with rotary positions on three axes, a tower without windows."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import (
    MOST_HEADS,
    MOST_LAYERS,
    WIDEST,
    activation_of,
    full_attention,
    gated_decoder,
    heads_of,
)
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.qwen2_vl.config import Qwen2Tower
from trencadis.multimodal.qwen2_vl.config_fields import PREFIXES, aliases, axial_theta, patches
from trencadis.multimodal.qwen2_vl.geometry import CHANNELS, PATCH
from trencadis.multimodal.qwen2_vl.media_tokens import NAMES, media_tokens

MOST_RATIO = 64


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Qwen2VLConfig, flat as on the hub or nested."""
    full_attention(c)
    heads = heads_of(c, whole=True)
    text = gated_decoder(c, heads, tied, positions=32768, theta=1e6, axes=True, qkv_bias=True)
    vision = _vision(root.within("vision_config"), text.hidden)
    return Described(text, vision, media_tokens(root, text.vocab))


def _vision(c: Fields, text_hidden: int) -> Qwen2Tower:
    patches(c)
    # The hub's files say these two besides; transformers reads neither.
    c.only("spatial_patch_size", (PATCH,), PATCH)
    c.only("in_chans", (CHANNELS,), CHANNELS)
    hidden, heads = c.integer("embed_dim", most=WIDEST), c.integer("num_heads", most=MOST_HEADS)
    if hidden % (4 * heads):
        c.refuse("num_heads", f"implemented: heads whose size is a multiple of 4, and embed_dim is {hidden}")
    out_hidden = c.integer("hidden_size", most=WIDEST, default=text_hidden)
    if out_hidden != text_hidden:
        c.refuse("hidden_size", f"it must be the text model's hidden_size, which is {text_hidden}")
    depth = c.integer("depth", most=MOST_LAYERS)
    aliases(c, depth, heads, hidden)
    return Qwen2Tower(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=int(hidden * c.number("mlp_ratio", 0, MOST_RATIO, 4, above=True)),
        out_hidden=out_hidden,
        full_layers=tuple(range(depth)),
        rope_theta=axial_theta(c),
        hidden_act=activation_of(c, "hidden_act", "quick_gelu"),
    )


FAMILY = Family(
    name="Qwen2-VL",
    model_type="qwen2_vl",
    architectures={"Qwen2VLForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES, inner=((".mlp.fc1.", ".mlp.up_proj."), (".mlp.fc2.", ".mlp.down_proj."))),
    make="trencadis.multimodal.qwen2_vl.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.qwen2_vl.needs:whole_needs",
        sizes="trencadis.multimodal.qwen2_vl.needs:whole_sizes",
        processor="trencadis.multimodal.qwen2_vl.processor:whole",
        tokens=NAMES,
        positions="trencadis.multimodal.qwen2_vl.mrope:counted_positions",
    ),
    defaults={"fp32_softmax": True},
)
