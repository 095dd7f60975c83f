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
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.qwen2_vl.config import Qwen25Tower
from trencadis.multimodal.qwen2_vl.config_fields import PREFIXES, aliases, axial_theta, patches
from trencadis.multimodal.qwen2_vl.geometry import FACTOR, WINDOW_CELLS
from trencadis.multimodal.qwen2_vl.media_tokens import NAMES, media_tokens

SILU = ("silu", "swish")


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Qwen2_5_VLConfig, flat as on the hub or nested."""
    full_attention(c)
    heads = heads_of(c, whole=True)
    text = gated_decoder(c, heads, tied, positions=32768, theta=1e6, axes=True, qkv_bias=True)
    vision = _vision(root.within("vision_config"), text.hidden)
    return Described(text, vision, media_tokens(root, text.vocab))


def _vision(c: Fields, text_hidden: int) -> Qwen25Tower:
    c.only("hidden_act", SILU, "silu")
    patches(c)
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
    aliases(c, depth, heads, hidden)
    return Qwen25Tower(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=c.integer("intermediate_size", most=WIDEST),
        out_hidden=out_hidden,
        full_layers=c.integers("fullatt_block_indexes", -MOST_LAYERS, MOST_LAYERS),
        tokens_per_second=c.number("tokens_per_second", 0, 10000, 4),
        rope_theta=axial_theta(c),
    )


FAMILY = Family(
    name="Qwen2.5-VL",
    model_type="qwen2_5_vl",
    architectures={"Qwen2_5_VLForConditionalGeneration": GENERATE},
    config=describe,
    names=StoredNames(PREFIXES),
    make="trencadis.multimodal.qwen2_5_vl.model:make",
    vision=VisionSide(
        needs="trencadis.multimodal.qwen2_vl.needs:windowed_needs",
        sizes="trencadis.multimodal.qwen2_vl.needs:windowed_sizes",
        processor="trencadis.multimodal.qwen2_vl.processor:windowed",
        tokens=NAMES,
        positions="trencadis.multimodal.qwen2_vl.mrope:timed_positions",
        windows=True,
    ),
    defaults={"fp32_softmax": True},
)
