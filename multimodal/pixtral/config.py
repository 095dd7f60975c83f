"""Parses the vision_config of Pixtral's tower. Torch-free.

Names of the weights of Pixtral's tower in checkpoints, and the functions that its families share.

Configuration of Pixtral's tower and its projector: sizes, weights, costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.decoder_config_parsers import activation_of
from trencadis.core.checkpoint.json_fields import JsonFields
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.core.vision_config import SharedMatrix, SlotForm
from trencadis.multimodal.vit.tile_vision_config import CHANNELS
from trencadis.multimodal.vit.vision_language_config import ViTDefaults, read_vit_fields
from trencadis.multimodal.vit.vit_config import ViTConfig

EPS = 1e-5
"""Epsilon of the tower's norms; no checkpoint has another value."""


@dataclass(frozen=True)
class PixtralVisionConfig(ViTConfig):
    """Configuration of Pixtral's vision transformer (2D rotary positions) and its projector.

    Args:
        patch: pixels along a side of a patch.
        theta: base of the rotary frequencies.
        merge: patches along a side of a cell.
        has_merger: cells are normalised and merged by a matrix before the projector; ``merge_eps``: epsilon of that
            norm.
    """

    patch: int
    theta: float
    activation: str
    projector: str
    projector_bias: bool
    merge: int = 1
    has_merger: bool = False
    merge_eps: float = EPS
    layer_norm: ClassVar[bool] = False
    without_adapters: ClassVar[tuple[str, ...]] = ("visual.merger",)  # its columns are reordered while loading
    qkv: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: ClassVar[str] = "self_attn.o_proj"
    mlp_in: ClassVar[tuple[str, ...]] = ("mlp.gate_proj", "mlp.up_proj")

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * self.patch**2, self.merge**2)

    @property
    def whole(self) -> int:
        return self.depth

    @property
    def biases(self) -> tuple[bool, bool]:
        return False, False

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        if self.has_merger:
            width = self.hidden * self.merge**2
            yield SharedMatrix("visual.merger", self.hidden, width, width)
        inner = -(-self.out_hidden // ranks)
        yield SharedMatrix("visual.projector.linear_1", inner, self.hidden, self.hidden)
        yield SharedMatrix("visual.projector.linear_2", self.out_hidden, inner, self.out_hidden)

    def other_weights(self, ranks: int) -> int:
        """Returns the number of weights in the projector, the merger, and the norms before the layers and before
        the merger.
        """
        matrices = sum(m.rows * m.columns for m in self.projector_matrices(ranks))
        biases = -(-self.out_hidden // ranks) + self.out_hidden if self.projector_bias else 0
        return matrices + biases + (1 + self.has_merger) * self.norm_weights

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        inner = 2 * -(-self.out_hidden // ranks) + self.out_hidden + self.hidden
        leaving = 4 * self.hidden + inner // self.merge**2
        return max(super().activations(slots, itemsize, ranks, unit), slots * leaving * itemsize)

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Returns the bytes that the projector's collective keeps."""
        if ranks == 1:
            return 0
        inner = self.hidden + 2 * -(-self.out_hidden // ranks) if cached else 0
        return slots // self.merge**2 * (inner + self.out_hidden) * itemsize


VIT_DEFAULTS = ViTDefaults(1024, 16, 24, 4096, 1024, 16, EPS, "gelu")
MERGE_SIZES = 1, 2, 4, 8


def read_pixtral_fields(root: JsonFields, c: JsonFields, width: int, defaults: ViTDefaults, biased: bool) -> JsonObject:
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


WEIGHT_NAMES = (
    (".transformer.layers.", ".blocks."),
    (".attention_norm.", ".norm1."),
    (".ffn_norm.", ".norm2."),
    (".attention.", ".self_attn."),
    (".feed_forward.", ".mlp."),
    (".projector.patch_merger.merging_layer.", ".merger."),
)
VISION_SIDE: JsonMapping = {
    "needs": "trencadis.multimodal.pixtral.processor:image_needs",
    "sizes": "trencadis.multimodal.pixtral.processor:image_sizes",
    "processor": "trencadis.multimodal.pixtral.processor:from_checkpoint",
    "tokens": {"image_token_index": "[IMG]"},
}
