"""The interface of a vision tower's configuration, for every family: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

WINDOW_SLOTS = 64
"""VISION slots per window, the unit of the tower's masks; real slots come first in it."""

CUT_WIDTHS = 6
"""Widths of the residual stream that are passed at the cuts before the two collectives of a layer."""


class SlotForm(NamedTuple):
    """A slot (one patch) of a VISION launch: its number of uint8 values, and how many slots (a cell) form one arena
    row.

    ``position_neighbours``: number of rows of the position table that a slot's position embedding interpolates; 0: the
    launch has none. ``padding_windows``: some windows hold padding slots, which other slots attend to and which do not
    attend to each other (``Segments.padding_window``). ``cross_attention_rows``: arena rows of an image that decoder
    layers attend to (``VisionConfig.cross_attention_rows``). ``within_windows``: no cell lies in two windows, so that a
    window of cells of 9 slots has 7 of them, and padding behind.
    """

    values: int = 0
    cell: int = 1
    position_neighbours: int = 0
    padding_windows: bool = False
    cross_attention_rows: int = 0
    within_windows: bool = False

    def cells(self, slots: int) -> int:
        """Returns the arena rows of ``slots`` slots in whole windows."""
        each = WINDOW_SLOTS // self.cell
        return slots // WINDOW_SLOTS * each if self.within_windows else slots // self.cell


NO_SLOT = SlotForm()
"""The slot form of a model without a vision tower."""


class VisionRowPart(NamedTuple):
    """A part of a VISION launch that runs over rows of it, in pieces on devices that compile fixed shapes.

    ``computed``: the arena rows that it stores to are a result of the launch's first part, not an input.
    """

    name: str
    rows: int
    computed: bool = False


class VisionLaunchParts(NamedTuple):
    """The parts of a VISION launch that a device may compile by themselves; those of equal names are equal.

    ``whole``: parts that run over all slots; ``by_rows``: those that run over rows. ``reals``: its inputs have real
    numbers beside integers.
    """

    whole: tuple[str, ...]
    by_rows: tuple[VisionRowPart, ...]
    reals: bool = False


class SharedMatrix(NamedTuple):
    """One rank's part of a weight matrix.

    ``whole``: input features over all ranks; ``first``: it is not fused with a preceding matrix.
    """

    name: str
    rows: int
    columns: int
    whole: int
    first: bool = True


@dataclass(frozen=True)
class VisionConfig(ABC):
    """A vision tower: ``depth`` layers over slots, and the projector to rows of the decoder's width.

    A family derives from it, adds the fields that its parser reads, and implements the sizes that planning needs; they
    count one layer. ``ranks`` devices share heads and columns. ``constants``: arena rows with the same content for
    every image (``media_spans.TokenRun``), which the model writes when it is bound. ``without_adapters``: beginnings of
    the names of matrices that take no LoRA adapters. ``rotary``: heads are rotated by the position of their slot.
    """

    constants: ClassVar[int] = 0
    without_adapters: ClassVar[tuple[str, ...]] = ()
    rotary: ClassVar[bool] = True

    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int

    @property
    @abstractmethod
    def slot(self) -> SlotForm:
        """The form of a slot."""

    @property
    @abstractmethod
    def whole(self) -> int:
        """Number of layers that attend over a whole item; the others attend inside windows."""

    @property
    def unused_layers(self) -> int:
        """Layers of the checkpoint after the first ``depth``, whose outputs nothing reads."""
        return 0

    @property
    def deepstack(self) -> int:
        """Parts of an arena row after the first; part i is added to the decoder's residual stream after layer i - 1."""
        return 0

    @property
    def cross_attention_rows(self) -> int:
        """Arena rows of an image for cross-attention (``TextConfig.cross_attention_layers``).

        0: tokens use rows instead.
        """
        return 0

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads

    @abstractmethod
    def slot_weights(self) -> float:
        """Returns the number of weights applied to one slot: layers, embedding, and its share of the projector."""

    @abstractmethod
    def count_weights(self) -> int:
        """Returns the number of weights of the whole tower, without norms and biases (under 0.1 %)."""

    @abstractmethod
    def count_rank_weights(self, ranks: int, unit: int = 1) -> int:
        """Returns the exact number of weights of rank 0, which alone holds the biases of summed outputs.

        ``unit``: the multiple that widths are padded to (``Policy.aligned``), also in the methods below.
        """

    @abstractmethod
    def tables(self, unit: int = 1) -> int:
        """Returns the bytes of constant tables, whose dtype is the same on every device."""

    @abstractmethod
    def matrices(self, ranks: int, unit: int = 1) -> Iterator[SharedMatrix]:
        """Yields the matrices that a checkpoint may quantise, with their canonical names."""

    @abstractmethod
    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        """Returns the peak activation memory in bytes of a launch of ``slots`` slots."""

    def launch_parts(self, slots: int) -> VisionLaunchParts:
        """Returns the parts of a launch of ``slots`` slots: patches, masks, each kind of layer, the projector."""
        layers = [name for name, count in (("windows", self.depth - self.whole), ("images", self.whole)) if count]
        projector = VisionRowPart("projector", self.slot.cells(slots))
        return VisionLaunchParts(("patches", "masks", *layers), (projector,), self.slot.position_neighbours > 0)

    @property
    def cut_widths(self) -> int:
        """Widths of the residual stream passed at the cuts before a layer's two collectives if ranks share it."""
        return CUT_WIDTHS

    @abstractmethod
    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Returns the bytes that a graph keeps for the projector.

        ``cached``: True if graphs keep the tensors passed at a cut.
        """
