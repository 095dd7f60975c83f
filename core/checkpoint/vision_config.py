"""What the engine asks of a vision tower, whatever its family: sizes, weights, costs. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

CUT_WIDTHS = 6
"""Widths of the residual stream that cross the cuts before the two collectives of a layer."""


class SlotForm(NamedTuple):
    """A slot of a VISION launch: its uint8 values, and how many slots (a cell) become one row of the arena.

    ``position_neighbours``: rows of a table of positions that a slot's own position is a weighted sum of; 0: the launch
    has none. ``padding_windows``: some windows hold padding slots, which other slots attend to and which do not attend
    to each other (``Segments.padding_window``). ``cross_attention_rows``: arena rows of an image that layers of the
    decoder attend to (``VisionConfig.cross_attention_rows``).
    """

    values: int = 0
    cell: int = 1
    position_neighbours: int = 0
    padding_windows: bool = False
    cross_attention_rows: int = 0


NO_SLOT = SlotForm()
"""Of a model without a vision tower."""


class SharedMatrix(NamedTuple):
    """A matrix of one rank; ``whole``: input features of all ranks, ``first``: it is not fused behind another one."""

    name: str
    rows: int
    columns: int
    whole: int
    first: bool = True


@dataclass(frozen=True)
class VisionConfig(ABC):
    """A tower: ``depth`` layers over slots, and what makes rows of the decoder's width of their output.

    A family derives from it, adds the fields that its parser reads, and answers in values what the plans ask; sizes are
    those of one layer. ``ranks`` devices share heads and columns. ``constants``: rows of the arena that hold the same
    for every image (``media_spans.TokenRun``), which its model writes when it is bound. ``rotary``: heads are rotated
    by the place of their slot.
    """

    constants: ClassVar[int] = 0
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
        """Layers whose attention spans a whole item; the others attend inside windows."""

    @property
    def deepstack(self) -> int:
        """Parts of an arena row behind the first; part i is added to the decoder's stream behind layer i - 1."""
        return 0

    @property
    def cross_attention_rows(self) -> int:
        """Arena rows of an image that layers attend to (``TextConfig.cross_attention_layers``); 0: tokens take rows
        instead.
        """
        return 0

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.hidden // self.heads

    @abstractmethod
    def slot_weights(self) -> float:
        """Weights that apply to one slot: layers, embedding, and a slot's share of what makes rows."""

    @abstractmethod
    def count_weights(self) -> int:
        """Weights of the whole tower, without norms and biases (under 0.1 %)."""

    @abstractmethod
    def count_rank_weights(self, ranks: int, unit: int = 1) -> int:
        """Weights of rank 0, exact; biases of what ranks sum lie there alone. ``unit``: what a device wants widths to
        be multiples of (``Policy.aligned``), here and below."""

    @abstractmethod
    def tables(self, unit: int = 1) -> int:
        """Bytes of tables that are no weights and have the same type on every device."""

    @abstractmethod
    def matrices(self, ranks: int, unit: int = 1) -> Iterator[SharedMatrix]:
        """What a checkpoint may quantise, by canonical names."""

    @abstractmethod
    def activations(self, slots: int, itemsize: int, ranks: int, unit: int = 1) -> int:
        """Most bytes that a launch of ``slots`` slots holds at a time."""

    @property
    def cut_widths(self) -> int:
        """Widths of the stream that cross the cuts before a layer's two collectives, where ranks share it."""
        return CUT_WIDTHS

    @abstractmethod
    def exit_keeps(self, slots: int, itemsize: int, ranks: int, cached: bool) -> int:
        """Bytes that a graph keeps of what makes rows; ``cached``: whether graphs keep what crosses a cut."""
