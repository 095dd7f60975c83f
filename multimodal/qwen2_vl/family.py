"""Qwen2-VL (and QVQ) as a family: Qwen2's decoder with rotary positions on three axes, a tower without windows."""

from __future__ import annotations

from trencadis.core.checkpoint.decoder_fields import MOST_LAYERS, activation_of
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.models.family import GENERATE, Described, Family, StoredNames, VisionSide
from trencadis.multimodal.qwen2_vl.config import Qwen2Tower
from trencadis.multimodal.qwen2_vl.config_fields import PREFIXES, aliases, axial_theta, described, patches, widths
from trencadis.multimodal.qwen2_vl.geometry import CHANNELS, PATCH
from trencadis.multimodal.qwen2_vl.media_tokens import NAMES

MOST_RATIO = 64


def describe(root: Fields, c: Fields, tied: bool) -> Described:
    """Qwen2VLConfig, flat as on the hub or nested."""
    return described(root, c, tied, _vision)


def _vision(c: Fields, text_hidden: int) -> Qwen2Tower:
    patches(c)
    # The hub's files say these two besides; transformers reads neither.
    c.only("spatial_patch_size", (PATCH,), PATCH)
    c.only("in_chans", (CHANNELS,), CHANNELS)
    hidden, heads, out_hidden = widths(c, "embed_dim", "hidden_size", text_hidden)
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
