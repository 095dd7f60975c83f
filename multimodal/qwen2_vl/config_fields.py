"""What the parsers of Qwen2-VL and Qwen2.5-VL share: keys of vision_config, and prefixes of weights. Torch-free."""

from __future__ import annotations

from trencadis.core.checkpoint.fields import Fields
from trencadis.core.checkpoint.rope_config import LARGEST_BASE
from trencadis.multimodal.qwen2_vl.geometry import CHANNELS, MERGE, PATCH, TEMPORAL

PREFIXES = {
    "model.visual.": "visual.",
    "visual.": "visual.",
    "model.language_model.": "",
    "model.": "",
    "lm_head.": "lm_head.",
}
"""Of transformers 5 and of the hub's files."""


def patches(c: Fields) -> None:
    """Refuses other sizes of a patch and of a merge cell, which are built into packing and processor."""
    c.only("patch_size", (PATCH,), PATCH)
    c.only("temporal_patch_size", (TEMPORAL,), TEMPORAL)
    c.only("spatial_merge_size", (MERGE,), MERGE)
    c.only("in_channels", (CHANNELS,), CHANNELS)


def aliases(c: Fields, depth: int, heads: int, hidden: int) -> None:
    """Holds keys that transformers reads as aliases to the values of those that count."""
    for alias, value in (("num_attention_heads", heads), ("num_hidden_layers", depth), ("head_dim", hidden // heads)):
        if c.given(alias):
            c.only(alias, (value,))


def axial_theta(c: Fields) -> float:
    """The base of the tower's rotary frequencies."""
    rope = c.within("rope_scaling" if c.values.get("rope_scaling") else "rope_parameters")
    for key in ("rope_type", "type"):
        if key in rope.values:
            rope.only(key, ("axial", "default"))
    place = rope if "rope_theta" in rope.values else c
    return place.number("rope_theta", 0, LARGEST_BASE, 10000.0, above=True)
