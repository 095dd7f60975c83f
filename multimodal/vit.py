"""Formulas of towers that are vision transformers: norms before attention and MLP, biases everywhere. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trencadis.core.checkpoint.vision_config import SharedMatrix, VisionConfig
from trencadis.core.layout import aligned

STREAMS = 4
"""Tensors as wide as the residual stream that are held beside attention or the MLP."""

WIDEST = 8
"""Such tensors while nothing else is held: in norms, in sums over ranks, in float32 rotary."""

FREQUENCY = 12
"""Bytes of a rotary frequency: float32, and its axis in int64."""


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """A vision transformer.

    ``layer_norm``: norms have a bias. The rest are canonical names: of the layers, and in each of qkv or its three
    parts, of the attention's output, of the MLP's matrices. ``filled``: its tower fills patches and columns of the MLP
    with zeros to a device's unit. ``planes``: bytes of a slot's value.
    """

    filled: ClassVar[bool] = False
    planes: ClassVar[int] = 1
    layer_norm: ClassVar[bool] = True
    layers_at: ClassVar[str] = "visual.blocks"
    qkv: ClassVar[tuple[str, ...]] = ("attn.qkv",)
    out: ClassVar[str] = "attn.proj"
    columns: ClassVar[tuple[str, ...]] = ("mlp.up_proj",)
    down: ClassVar[str] = "mlp.down_proj"

    @abstractmethod
    def exit_matrices(self, ranks: int) -> Iterator[SharedMatrix]:
        """As ``matrices``: of what makes rows."""

    @abstractmethod
    def beside(self, ranks: int) -> int:
        """Values of rank 0 beside layers and patch embedding, exact."""

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases; whether the attention's output and the MLP have."""
        return True, True

    @property
    def embedded(self) -> int:
        """Values of a slot, which the patch embedding multiplies."""
        return self.slot.values // self.planes

    @property
    def norm(self) -> int:
        """Values of a norm over the stream."""
        return self.hidden * (2 if self.layer_norm else 1)

    def _layer(self) -> int:
        return 4 * self.hidden**2 + (len(self.columns) + 1) * self.hidden * self.intermediate

    def _exit(self) -> int:
        return sum(m.rows * m.columns for m in self.exit_matrices(1))

    def slot_weights(self) -> float:
        return self.depth * self._layer() + self.embedded * self.hidden + self._exit() / self.slot.cell

    def stored(self) -> int:
        return self.depth * self._layer() + self.embedded * self.hidden + self._exit()

    def _columns(self, ranks: int, unit: int) -> int:
        """Columns of the MLP of one rank."""
        return aligned(-(-self.intermediate // ranks), unit if self.filled else 1)

    def _values(self, unit: int) -> int:
        """Columns of the patch embedding."""
        return aligned(self.embedded, unit if self.filled else 1)

    def held(self, ranks: int, unit: int = 1) -> int:
        heads, columns, matrices = -(-self.hidden // ranks), self._columns(ranks, unit), len(self.columns)
        layer = self.hidden * (4 * heads + (matrices + 1) * columns) + 2 * self.norm
        first, others = self.biases
        layer += 3 * heads * first + (matrices * columns + 2 * self.hidden) * others
        return self.depth * layer + self._values(unit) * self.hidden + self.beside(ranks)

    def tables(self, unit: int = 1) -> int:
        """Rotary frequencies, and how a byte becomes a value, float32 twice."""
        return (self.head_dim // 2 * FREQUENCY if self.rotary else 0) + 2 * self.planes * self._values(unit) * 4

    def matrices(self, ranks: int, unit: int = 1) -> Iterator[SharedMatrix]:
        width, columns = -(-self.hidden // ranks), self._columns(ranks, unit)
        for i in range(self.depth):
            at = f"{self.layers_at}.{i}"
            for name in self.qkv:
                first = name == self.qkv[0]
                yield SharedMatrix(f"{at}.{name}", 3 // len(self.qkv) * width, self.hidden, self.hidden, first)
            yield SharedMatrix(f"{at}.{self.out}", self.hidden, width, self.hidden)
            for name in self.columns:
                yield SharedMatrix(f"{at}.{name}", columns, self.hidden, self.hidden, name == self.columns[0])
            yield SharedMatrix(f"{at}.{self.down}", self.hidden, columns, self.intermediate)
        yield from self.exit_matrices(ranks)

    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        heads, columns = -(-self.hidden // ranks), self._columns(ranks, unit)
        streams = STREAMS * self.hidden * itemsize + 8 * self.head_dim
        inner = (len(self.columns) + 2) * columns * itemsize
        return slots * max(streams + max(34 * heads, inner), (WIDEST * itemsize + 1) * self.hidden)
