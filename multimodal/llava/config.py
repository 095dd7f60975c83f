"""The CLIP tower and the projector as the engine's plans see them: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.vision_config import SharedMatrix, SlotForm
from trencadis.core.layout import WINDOW_SLOTS
from trencadis.multimodal.vit import ViTConfig

CHANNELS = 3


@dataclass(frozen=True)
class ClipTower(ViTConfig):
    """CLIP's layers up to the one whose output is read (``depth`` of them), and a projector of two linear layers.

    A picture is one tile: its patches row by row, then the class token, which no token of the decoder is made of.
    """

    image: int
    patch: int
    eps: float = 1e-5
    activation: str = "quick_gelu"
    projector: str = "gelu"
    projector_bias: bool = True
    rotary: ClassVar[bool] = False
    qkv: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: ClassVar[str] = "self_attn.out_proj"

    @property
    def side(self) -> int:
        """Patches along a side of the picture."""
        return self.image // self.patch

    @property
    def tokens(self) -> int:
        """Decoder tokens of a picture: its patches."""
        return self.side**2

    @property
    def tile(self) -> int:
        """VISION slots of a picture, its class token included."""
        return -(-(self.tokens + 1) // WINDOW_SLOTS) * WINDOW_SLOTS

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * self.patch**2, 1)

    @property
    def whole(self) -> int:
        return self.depth

    def exit_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        inner = -(-self.out_hidden // ranks)
        yield SharedMatrix("visual.projector.linear_1", inner, self.hidden, self.hidden)
        yield SharedMatrix("visual.projector.linear_2", self.out_hidden, inner, self.out_hidden)

    def beside(self, ranks: int) -> int:
        """The table of positions, which holds the class token's embedding in its first row, a norm, the projector."""
        inner = -(-self.out_hidden // ranks)
        biases = inner + self.out_hidden if self.projector_bias else 0
        return (self.tokens + 1) * self.hidden + self.norm + inner * (self.hidden + self.out_hidden) + biases

    def activations(self, slots: int, itemsize: int, ranks: int) -> int:
        leaving = (2 * self.hidden + 2 * -(-self.out_hidden // ranks) + self.out_hidden) * itemsize
        return max(super().activations(slots, itemsize, ranks), slots * leaving)

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """The projector's collective."""
        if ranks == 1:
            return 0
        inner = self.hidden + 2 * -(-self.out_hidden // ranks) if cached else 0
        return slots * (inner + self.out_hidden) * itemsize
