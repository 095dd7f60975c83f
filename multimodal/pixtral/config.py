"""Pixtral's tower and projector as the engine's plans see them: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from trencadis.core.checkpoint.decoder_fields import activation_of
from trencadis.core.checkpoint.fields import Fields
from trencadis.core.checkpoint.vision_config import SharedMatrix, SlotForm
from trencadis.multimodal.tiles.config import CHANNELS
from trencadis.multimodal.tiles.fields import Usual, tile_fields
from trencadis.multimodal.vit import ViTConfig

EPS = 1e-5
"""Of the tower's norms; no checkpoint states another."""

USUAL = Usual(1024, 16, 24, 4096, 1024, 16, EPS, "gelu")
MERGES = 1, 2, 4, 8


@dataclass(frozen=True)
class LineTower(ViTConfig):
    """A vision transformer whose heads turn by row and column, and a projector.

    Args:
        patch: pixels along a side of a patch.
        theta: of the rotary frequencies.
        merge: patches along a side of a cell.
        merged: cells are normed and merged by a matrix before the projector; ``merge_eps``: of that norm.
    """

    patch: int
    theta: float
    activation: str
    projector: str
    projector_bias: bool
    merge: int = 1
    merged: bool = False
    merge_eps: float = EPS
    layer_norm: ClassVar[bool] = False
    qkv: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: ClassVar[str] = "self_attn.o_proj"
    columns: ClassVar[tuple[str, ...]] = ("mlp.gate_proj", "mlp.up_proj")

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * self.patch**2, self.merge**2)

    @property
    def whole(self) -> int:
        return self.depth

    @property
    def biases(self) -> tuple[bool, bool]:
        return False, False

    def exit_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        if self.merged:
            width = self.hidden * self.merge**2
            yield SharedMatrix("visual.merger", self.hidden, width, width)
        inner = -(-self.out_hidden // ranks)
        yield SharedMatrix("visual.projector.linear_1", inner, self.hidden, self.hidden)
        yield SharedMatrix("visual.projector.linear_2", self.out_hidden, inner, self.out_hidden)

    def beside(self, ranks: int) -> int:
        """The projector, what merges cells, and the norms before the layers and behind them."""
        matrices = sum(m.rows * m.columns for m in self.exit_matrices(ranks))
        biases = -(-self.out_hidden // ranks) + self.out_hidden if self.projector_bias else 0
        return matrices + biases + (1 + self.merged) * self.norm

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        inner = 2 * -(-self.out_hidden // ranks) + self.out_hidden + self.hidden
        leaving = 4 * self.hidden + inner // self.merge**2
        return max(super().activations(slots, itemsize, ranks, unit), slots * leaving * itemsize)

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """The projector's collective."""
        if ranks == 1:
            return 0
        inner = self.hidden + 2 * -(-self.out_hidden // ranks) if cached else 0
        return slots // self.merge**2 * (inner + self.out_hidden) * itemsize


def tower_fields(root: Fields, c: Fields, width: int, usual: Usual, biased: bool) -> dict[str, Any]:
    """The fields of a ``LineTower``; ``width``: of the decoder, ``biased``: whether the projector usually is."""
    found = tile_fields(c, ("pixtral",), usual, width)
    heads = found["hidden"] // found["heads"]
    if heads % 4 or c.integer("head_dim", default=heads) != heads:
        c.refuse("head_dim", f"implemented: hidden_size / num_attention_heads, a multiple of 4, which is {heads}")
    rope = c.within("rope_parameters", {})
    rope.only("rope_type", ("axial", "default"), "axial")
    theta = rope.number("rope_theta", 1, 1e12, c.number("rope_theta", 1, 1e12, 1e4))
    layers = found["depth"]
    asked = root.integer("vision_feature_layer", -layers - 1, layers, -1)
    if (depth := asked if asked >= 0 else layers + 1 + asked) < 1:
        root.refuse("vision_feature_layer", f"implemented: the output of one of the {layers} layers")
    kept = {key: found[key] for key in ("hidden", "heads", "intermediate", "out_hidden", "patch", "activation")}
    return {
        **kept,
        "depth": depth,
        "theta": theta,
        "projector": activation_of(root, "projector_hidden_act", "gelu"),
        "projector_bias": root.boolean("multimodal_projector_bias", biased),
    }
