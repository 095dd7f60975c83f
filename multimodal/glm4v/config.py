"""Configuration of GLM-4.1V's tower: sizes, weights, costs. Torch-free.

Samples a square table of position embeddings at the centres of an image's patches (bicubic). Pure numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.step import Encode, Float32, Int32
from trencadis.core.vision_config import SharedMatrix, SlotForm
from trencadis.multimodal.patch_packing import add_positions, join_neighbours, patch_coordinates
from trencadis.multimodal.qwen2_vl.preprocessor_config import ProcessorRules
from trencadis.multimodal.vit.vit_config import ViTConfig

CHANNELS, FRAMES = 3, 2
"""Number of colour channels and of frames of a patch."""

EDGES = 112 * 112, 28 * 28 * 15000
"""Default limits, of both frames of a patch."""

RULES = ProcessorRules(("Glm4vImageProcessor", "Glm46VImageProcessor"), EDGES, frames=2, grows_small=True)

ALONG = 4
"""Rows of the table along each axis that a position is sampled from."""

NEIGHBOURS = ALONG * ALONG
SHARPNESS = np.float32(-0.75)
"""The parameter of the cubic kernel, as in torch's grid_sample."""


def sample_axis(position: Int32, count: int, side: int) -> tuple[Int32, Float32]:
    """Returns the neighbours in the table, int32 [n, 4], and their weights, float32 [n, 4], of ``count`` patches along
    one axis.

    A patch is sampled at its centre; neighbours outside of the table are those at its edge.
    """
    share = (position.astype(np.float32) + np.float32(0.5)) / np.float32(count)
    exact = share * np.float32(side) - np.float32(0.5)
    floor = np.floor(exact)
    distance = (exact - floor)[:, None] + np.array([1, 0, -1, -2], np.float32)
    near = floor.astype(np.int32)[:, None] + np.arange(-1, 3, dtype=np.int32)
    return np.clip(near, 0, side - 1), _cubic_weights(np.abs(distance))


def _cubic_weights(distance: Float32) -> Float32:
    """Returns the weights of the cubic kernel at distances from 0 to 2."""
    a, x = SHARPNESS, distance
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, inner, outer).astype(np.float32)


@lru_cache(maxsize=256)
def sampled_positions(h: int, w: int, side: int, merge: int) -> tuple[Int32, Float32]:
    """Returns for each patch of a grid its rows of the table, int32 [h x w, 16], and their weights, float32."""
    coordinates = patch_coordinates(h, w, merge)
    rows, columns = sample_axis(coordinates[:, 0], h, side), sample_axis(coordinates[:, 1], w, side)
    return join_neighbours(rows, columns, side)


def add_sampled_positions(packed: VisionInputs, images: Sequence[Encode], side: int, merge: int) -> VisionInputs:
    """Adds to packed images each patch's rows in a table of ``side`` x ``side`` positions and their weights."""
    return add_positions(packed, images, NEIGHBOURS, lambda h, w: sampled_positions(h, w, side, merge))


@dataclass(frozen=True)
class Glm4vVisionConfig(ViTConfig):
    """Vision transformer with RMS norms, gated MLPs and full attention; cells are joined by a convolution, projected,
    and pass a gated MLP.

    Args:
        side: the position table has ``side`` x ``side`` entries; 0: there is neither a table nor a norm of patches.
        context: inner columns of the merger's MLP.
        eps: epsilon of the RMS norms.
        activation: activation of all gated MLPs.
        rope_theta: base of the rotary frequencies.
        patch: pixels along a side of a patch.
        merge: patches along a side of a cell.
        qkv_bias: queries, keys and values have biases.
        other_biases: the output of attention and the MLP have biases.
        head_norms: each head of queries and keys passes an RMS norm.
    """

    side: int
    context: int
    eps: float
    activation: str
    rope_theta: float
    patch: int
    merge: int
    qkv_bias: bool
    other_biases: bool = False
    head_norms: bool = False
    layer_norm: ClassVar[bool] = False
    mlp_in: ClassVar[tuple[str, ...]] = ("mlp.gate_proj", "mlp.up_proj")

    @property
    def slot(self) -> SlotForm:
        return SlotForm(CHANNELS * FRAMES * self.patch**2, self.merge**2, NEIGHBOURS if self.side else 0)

    @property
    def whole(self) -> int:
        return self.depth

    @property
    def biases(self) -> tuple[bool, bool]:
        return self.qkv_bias, self.other_biases

    @property
    def qk_norm(self) -> bool:
        return self.head_norms

    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        out, inner = self.out_hidden, -(-self.context // ranks)
        yield SharedMatrix("visual.merger.proj", out, out, out)
        yield SharedMatrix("visual.merger.gate_proj", inner, out, out)
        yield SharedMatrix("visual.merger.up_proj", inner, out, out, first=False)
        yield SharedMatrix("visual.merger.down_proj", out, inner, self.context)

    def other_weights(self, ranks: int) -> int:
        """Counts the patch bias, the norms, the position table, the convolution over cells, and the merger with its
        layer norm.
        """
        out, inner = self.out_hidden, -(-self.context // ranks)
        own = self.hidden * (2 + (self.side > 0) + self.side**2)
        return own + out * self.hidden * self.merge**2 + out + out * out + 2 * out + 3 * inner * out

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        leaving = 3 * self.hidden + (5 * self.out_hidden + 3 * -(-self.context // ranks)) // self.merge**2
        return max(super().activations(slots, itemsize, ranks, unit), slots * leaving * itemsize)

    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Returns the bytes that the merger's collective keeps."""
        if ranks == 1:
            return 0
        inner = self.hidden * self.merge**2 + -(-self.context // ranks) if cached else 0
        return slots // self.merge**2 * (inner + self.out_hidden) * itemsize
