"""Qwen2.5-VL as a family: Qwen2's decoder with rotary positions on three axes, and the tower's configuration."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import MOST_LAYERS, WIDEST
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.qwen2_vl.config import Qwen25Tower
from trencadis.multimodal.qwen2_vl.config_fields import PREFIXES, aliases, axial_theta, described, patches, widths
from trencadis.multimodal.qwen2_vl.geometry import FACTOR, WINDOW_CELLS
from trencadis.multimodal.qwen2_vl.media_tokens import NAMES

SILU = ("silu", "swish")


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Qwen2_5_VLConfig, flat as on the hub or nested."""
    return described(root, c, tied, _vision)


def _vision(c: Fields, text_hidden: int) -> Qwen25Tower:
    c.only("hidden_act", SILU, "silu")
    patches(c)
    window = WINDOW_CELLS * FACTOR
    if c.integer("window_size", default=window) // FACTOR != WINDOW_CELLS:
        c.refuse("window_size", f"implemented: windows of {window} pixels")
    hidden, heads, out_hidden = widths(c, "hidden_size", "out_hidden_size", text_hidden)
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
