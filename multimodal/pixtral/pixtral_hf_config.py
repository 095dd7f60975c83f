"""Parses the vision_config of Pixtral's tower. Torch-free."""

from __future__ import annotations

from typing import Any

from trencadis.core.checkpoint.decoder_fields import activation_of
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.multimodal.pixtral_tower.config import EPS
from trencadis.multimodal.vit.hf_vision_config import ViTDefaults, read_vit_fields

VIT_DEFAULTS = ViTDefaults(1024, 16, 24, 4096, 1024, 16, EPS, "gelu")
MERGE_SIZES = 1, 2, 4, 8


def read_pixtral_fields(
    root: JsonFields, c: JsonFields, width: int, defaults: ViTDefaults, biased: bool
) -> dict[str, Any]:
    """Returns the fields of a ``PixtralVisionConfig``.

    ``width``: of the decoder, ``biased``: default of the projector's bias.
    """
    found = read_vit_fields(c, ("pixtral",), defaults, width)
    heads = found["hidden"] // found["heads"]
    if heads % 4 or c.integer("head_dim", default=heads) != heads:
        c.refuse("head_dim", f"implemented: hidden_size / num_attention_heads, a multiple of 4, which is {heads}")
    rope = c.within("rope_parameters", {})
    rope.only("rope_type", ("axial", "default"), "axial")
    theta = rope.number("rope_theta", 1, 1e12, c.number("rope_theta", 1, 1e12, 1e4))
    layers = found["depth"]
    feature_layer = root.integer("vision_feature_layer", -layers - 1, layers, -1)
    if (depth := feature_layer if feature_layer >= 0 else layers + 1 + feature_layer) < 1:
        root.refuse("vision_feature_layer", f"implemented: the output of one of the {layers} layers")
    kept = {key: found[key] for key in ("hidden", "heads", "intermediate", "out_hidden", "patch", "activation")}
    return {
        **kept,
        "depth": depth,
        "theta": theta,
        "projector": activation_of(root, "projector_hidden_act", "gelu"),
        "projector_bias": root.boolean("multimodal_projector_bias", biased),
    }
