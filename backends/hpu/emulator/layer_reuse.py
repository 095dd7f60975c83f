"""Layers that do what an earlier one of the same launch did: without values their figures repeat, so they need no run.

A layer of a stack takes (x, residual) and leaves two tensors of the same shapes in their place. A second one of the
same kind and weights' shapes adds the same rows to the recipe and needs the same memory above what is held already.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator.device_tensor import flatten
from trencadis.backends.hpu.emulator.protocols import RecipeScope


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A row of a recording that stands for ``mark_step``; ``fresh``: bytes of the layer's own that cross it first."""

    fresh: int


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """What one layer did.

    Args:
        rows: rows of the recipe and cuts, in order.
        peak: its most bytes above what was held before.
        left: bytes that it left alive and that crossed no cut yet.
        collective: bytes that its collectives left in place.
    """

    rows: tuple[Hashable, ...]
    peak: int
    left: int
    collective: int

    @property
    def cut(self) -> bool:
        """Whether a cut lies inside the layer."""
        return any(isinstance(row, LayerCut) for row in self.rows)


class LayerReuse:
    """The distinct layers of one launch."""

    def __init__(self) -> None:
        self._known: dict[Hashable, LayerRecord] = {}
        self._rows: list[Hashable] | None = None
        self._base = 0
        self._left = -1
        """Cuts before the outputs of the last layer, if they are alive and crossed none."""

    def note(self, row: Hashable) -> None:
        """Takes a row into the recording that is open."""
        if self._rows is not None:
            self._rows.append(row)

    def cut(self, fresh: int) -> None:
        """Takes a cut into the recording that is open."""
        self.note(LayerCut(fresh - self._base))
        self._base = 0

    def layer(self, scope: RecipeScope, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a layer that is new to this launch; for an equal one replays the recorded figures and returns its
        inputs.
        """
        key = (signature(run), *(leaf_key(leaf) for leaf in flatten(args)))
        known = self._known.get(key)
        if known is not None:
            return self._reuse(scope, known, args)
        live, before, summed = scope.live, scope.live.peak, scope.collective
        base = live.peak = live.now
        self._base, self._rows = live.fresh, []
        try:
            out = run(*args)
        finally:
            rows, self._rows = self._rows, None
            peak, live.peak = live.peak - base, max(before, live.peak)
        left = live.fresh - self._base
        if isinstance(out, tuple) and [leaf_key(t) for t in out] == [leaf_key(t) for t in args[: len(out)]]:
            self._known[key] = LayerRecord(tuple(rows), peak, left, scope.collective - summed)
        self._left = live.cuts
        return out

    def _reuse(self, scope: RecipeScope, known: LayerRecord, args: tuple[Any, ...]) -> Any:
        live = scope.live
        live.peak = max(live.peak, live.now + known.peak)
        fresh = self._left == live.cuts  # inputs go when the layer's outputs take their places
        for row in known.rows:
            if isinstance(row, LayerCut):
                live.fresh += row.fresh
                scope.cut()
            else:
                scope.collect(row)
        live.fresh += 0 if fresh and not known.cut else known.left
        scope.collective += known.collective
        self._left = live.cuts
        return args[:2]


def leaf_key(leaf: Any) -> Hashable:
    """Strides are left out: torch's meta kernels lay some results out otherwise than the CPU's."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, int | float | bool | str | torch.dtype) or leaf is None else str(leaf)


def signature(layer: Any) -> Hashable:
    """Kind of a layer, and everything that its attributes say: shapes of tensors, numbers, functions, parts."""
    found: list[Hashable] = [type(layer).__qualname__]
    for name, value in vars(layer).items():
        if name == "ops" or name == "comm":
            continue
        if isinstance(value, Tensor | int | float | str | bool) or value is None:
            found.append((name, leaf_key(value)))
        elif isinstance(value, tuple | list):
            found.append((name, *(leaf_key(leaf) for leaf in flatten(value))))
        elif callable(value) and hasattr(value, "__func__"):
            found.append((name, value.__func__.__qualname__))
        elif hasattr(value, "__dict__"):
            found.append((name, signature(value)))
    return tuple(found)
