"""Configuration of Gemma-3's SigLIP tower with averaged patches: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trencadis.core.vision_config import SharedMatrix
from trencadis.multimodal.vit.tile_vision_config import SiglipVisionConfig


@dataclass(frozen=True)
class Gemma3VisionConfig(SiglipVisionConfig):
    """Configuration of Gemma-3's SigLIP tower.

    An image is one tile; a row is the normed and projected mean of a cell's patches.
    """

    @property
    def projector_weights(self) -> int:
        """Number of weights of the projector, which no checkpoint quantises."""
        return self.hidden * self.out_hidden

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        yield from ()

    def _projector_weights(self) -> int:
        return self.projector_weights

    def other_weights(self, ranks: int) -> int:
        """Counts the position table, the last norm and the projector, which are whole on every rank."""
        return (self.side**2 + 1) * self.hidden + self.norm_weights + self.projector_weights

    def tables(self, unit: int = 1) -> int:
        """Adds the bytes of the projector's norm, which is float32."""
        return super().tables(unit) + 4 * self.hidden

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        """Includes the means, which are computed in float32."""
        leaving = slots * self.hidden * (4 * itemsize + 4)
        return max(super().activations(slots, itemsize, ranks, unit), leaving)
