"""The protocol of a library for one bucket: tables in addition to its inputs, and attention of its launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cuda.kernels.attention_tensors import ItemAttn
from trencadis.core.device.backend import LayerKV

Array = NDArray[Any]


class LibraryLaunch(Protocol):
    """The launches of one bucket of text."""

    plans: bool
    """True if ``plan`` must run for each launch."""

    def plan(self, arrays: Mapping[str, Array]) -> None:
        """Plans the next launch from its host arrays, by name, along with the copy of its inputs; never within a
        graph.
        """
        ...

    def begin(self, attn: ItemAttn) -> None:
        """Computes what all layers share, at the start of the body and in its graph."""
        ...

    def attend(self, q: Tensor, kv: LayerKV, scale: float, window: int) -> Tensor:
        """Computes attention [n, h, d]; surplus tokens get 0."""
        ...
