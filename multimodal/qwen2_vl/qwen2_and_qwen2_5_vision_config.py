"""Configuration of the towers of Qwen2-VL and Qwen2.5-VL: sizes, weights, costs. Torch-free.

The geometry of images that Qwen2-VL and Qwen2.5-VL share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.vision_config import SharedMatrix, SlotForm
from trencadis.multimodal.vit.vit_config import ViTConfig

PATCH = 14
"""Pixels along a side of a patch of an image."""

TEMPORAL, CHANNELS = 2, 3
PATCH_VALUES = CHANNELS * TEMPORAL * PATCH * PATCH
"""Values of one patch, uint8 on the host: channels x frames x height x width."""

MERGE = 2
"""Patches along a side of a merge cell, which becomes one token of the decoder."""

CELL = MERGE * MERGE
"""Patches of a merge cell."""

FACTOR = PATCH * MERGE
"""Pixels along a side of a merge cell."""

WINDOW_CELLS = 4
"""Merge cells along a side of an attention window of Qwen2.5-VL's tower."""

WINDOW_PATCHES = WINDOW_CELLS * MERGE


ATTENTION_TILE = 1024
"""Query slots of one tile of full attention on a device that splits it."""

CUT_ABOVE_SLOTS = 64 * ATTENTION_TILE
"""Number of slots above which graphs are cut between tiles of full attention."""


@dataclass(frozen=True)
class Qwen25VisionConfig(ViTConfig):
    """Configuration of Qwen2.5-VL's tower.

    It has RMS norms, gated MLPs, attention in windows of 8 x 8 patches except in ``full_layers``, and a merger after
    the layers.
    """

    full_layers: tuple[int, ...]
    patch: int = PATCH
    merge: int = MERGE
    temporal: int = TEMPORAL
    channels: int = CHANNELS
    tokens_per_second: float = 2.0
    rope_theta: float = 10000.0
    pads_to_unit: ClassVar[bool] = True
    layer_norm: ClassVar[bool] = False
    mlp_in: ClassVar[tuple[str, ...]] = ("mlp.gate_proj", "mlp.up_proj")

    @property
    def activation(self) -> str:
        """Activation of the MLPs, a name of ``Ops.act``."""
        return "silu"

    @property
    def patch_values(self) -> int:
        """Number of values of one patch: channels x temporal x patch x patch."""
        return self.channels * self.temporal * self.patch * self.patch

    @property
    def slot(self) -> SlotForm:
        return SlotForm(self.patch_values, self.merge**2)

    @property
    def whole(self) -> int:
        return len(self.full_layers)

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        merged = self.hidden * self.merge**2
        yield SharedMatrix("visual.merger.mlp.0", -(-merged // ranks), merged, merged)
        yield SharedMatrix("visual.merger.mlp.2", self.out_hidden, -(-merged // ranks), merged)

    def other_weights(self, ranks: int) -> int:
        merged = self.hidden * self.merge**2
        inner = -(-merged // ranks)
        return self.norm_weights + merged * inner + inner + inner * self.out_hidden + self.out_hidden

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Returns the bytes that the merger's collective keeps, plus an estimate for cuts between tiles of full
        attention.
        """
        group = self.merge**2
        merged = slots * self.hidden + slots // group * -(-group * self.hidden // ranks) if cached else 0
        total = (merged + slots // group * self.out_hidden) * itemsize if ranks > 1 else 0
        if slots > CUT_ABOVE_SLOTS and cached:
            total += self.whole * self.activations(slots, itemsize, ranks) * 6 // 10
        return total


@dataclass(frozen=True)
class Qwen2VisionConfig(Qwen25VisionConfig):
    """Qwen2-VL's tower: layer norms, plain MLPs, attention over whole images in every layer."""

    hidden_act: str = "quick_gelu"
    layer_norm: ClassVar[bool] = True
    mlp_in: ClassVar[tuple[str, ...]] = ("mlp.up_proj",)

    @property
    def activation(self) -> str:
        return self.hidden_act
