"""Sizes of towers that are vision transformers: norms before attention and MLP, biases everywhere. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.buckets import align_up
from trencadis.core.vision_config import SharedMatrix, VisionConfig

STREAMS = 4
"""Number of tensors as wide as the residual stream that are held during attention or the MLP."""

WIDEST = 8
"""Number of such tensors while nothing else is held: in norms, in all-reduces, in float32 rotary."""

FREQUENCY = 12
"""Bytes of a rotary frequency: float32, plus its axis in int64."""


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """Configuration of a vision transformer.

    ``layer_norm``: norms have a bias. ``layer_prefix``: canonical name of the layers; ``qkv`` (fused, or its three
    parts), ``attention_out``, ``mlp_in`` and ``mlp_out``: canonical names within a layer. ``pads_to_unit``: its tower
    pads patches and columns of the MLP with zeros to a device's alignment unit. ``bytes_per_value``: bytes of a slot's
    value.
    """

    pads_to_unit: ClassVar[bool] = False
    bytes_per_value: ClassVar[int] = 1
    layer_norm: ClassVar[bool] = True
    layer_prefix: ClassVar[str] = "visual.blocks"
    qkv: ClassVar[tuple[str, ...]] = ("attn.qkv",)
    attention_out: ClassVar[str] = "attn.proj"
    mlp_in: ClassVar[tuple[str, ...]] = ("mlp.up_proj",)
    mlp_out: ClassVar[str] = "mlp.down_proj"

    @abstractmethod
    def projector_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        """Yields the projector's matrices, in the form of ``matrices``."""

    @abstractmethod
    def other_weights(self, ranks: int) -> int:
        """Returns the exact number of weights of rank 0 outside of the layers and the patch embedding."""

    @property
    def qk_norm(self) -> bool:
        """True if each head of queries and keys passes an RMS norm."""
        return False

    @property
    def biases(self) -> tuple[bool, bool]:
        """(True if queries, keys and values have biases, True if the attention's output and the MLP have)."""
        return True, True

    @property
    def patch_embed_inputs(self) -> int:
        """Number of values of a slot that the patch embedding multiplies."""
        return self.slot.values // self.bytes_per_value

    @property
    def norm_weights(self) -> int:
        """Number of weights of a norm over the residual stream."""
        return self.hidden * (2 if self.layer_norm else 1)

    def _layer_weights(self) -> int:
        return 4 * self.hidden**2 + (len(self.mlp_in) + 1) * self.hidden * self.intermediate

    def _projector_weights(self) -> int:
        return sum(m.rows * m.columns for m in self.projector_matrices(1))

    def slot_weights(self) -> float:
        return (
            self.depth * self._layer_weights()
            + self.patch_embed_inputs * self.hidden
            + self._projector_weights() / self.slot.cell
        )

    def count_weights(self) -> int:
        return self.depth * self._layer_weights() + self.patch_embed_inputs * self.hidden + self._projector_weights()

    def _mlp_columns(self, ranks: int, unit: int) -> int:
        """Returns the number of columns of one rank's MLP."""
        return align_up(-(-self.intermediate // ranks), unit if self.pads_to_unit else 1)

    def _patch_embed_columns(self, unit: int) -> int:
        """Returns the number of columns of the patch embedding."""
        return align_up(self.patch_embed_inputs, unit if self.pads_to_unit else 1)

    def count_rank_weights(self, ranks: int, unit: int = 1) -> int:
        heads, columns, matrices = -(-self.hidden // ranks), self._mlp_columns(ranks, unit), len(self.mlp_in)
        layer = self.hidden * (4 * heads + (matrices + 1) * columns) + 2 * self.norm_weights
        first, others = self.biases
        layer += 3 * heads * first + (matrices * columns + 2 * self.hidden) * others + 2 * self.head_dim * self.qk_norm
        return self.depth * layer + self._patch_embed_columns(unit) * self.hidden + self.other_weights(ranks)

    def tables(self, unit: int = 1) -> int:
        """Returns the bytes of the rotary frequencies, and of scale and shift of the pixel values (both float32)."""
        return (
            self.head_dim // 2 * FREQUENCY if self.rotary else 0
        ) + 2 * self.bytes_per_value * self._patch_embed_columns(unit) * 4

    def matrices(self, ranks: int, unit: int = 1) -> Iterator[SharedMatrix]:
        width, columns = -(-self.hidden // ranks), self._mlp_columns(ranks, unit)
        for i in range(self.depth):
            at = f"{self.layer_prefix}.{i}"
            for name in self.qkv:
                first = name == self.qkv[0]
                yield SharedMatrix(f"{at}.{name}", 3 // len(self.qkv) * width, self.hidden, self.hidden, first)
            yield SharedMatrix(f"{at}.{self.attention_out}", self.hidden, width, self.hidden)
            for name in self.mlp_in:
                yield SharedMatrix(f"{at}.{name}", columns, self.hidden, self.hidden, name == self.mlp_in[0])
            yield SharedMatrix(f"{at}.{self.mlp_out}", self.hidden, columns, self.intermediate)
        yield from self.projector_matrices(ranks)

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        heads, columns = -(-self.hidden // ranks), self._mlp_columns(ranks, unit)
        streams = STREAMS * self.hidden * itemsize + 8 * self.head_dim
        inner = (len(self.mlp_in) + 2) * columns * itemsize
        return slots * max(streams + max(34 * heads, inner), (WIDEST * itemsize + 1) * self.hidden)
