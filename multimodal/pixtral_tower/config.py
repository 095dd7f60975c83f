"""Configuration of Pixtral's tower and its projector: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.vision_config import SharedMatrix, SlotForm
from trencadis.multimodal.vit.base_config import ViTConfig
from trencadis.multimodal.vit.config import CHANNELS

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
