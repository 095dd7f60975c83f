"""Compile mode: several layers of a DECODE launch as one region, since dispatching each alone takes longer than its
work on the card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SIZES = (1, 2, 4)
"""Layers of a region that may be asked for."""


class LayerGroup:
    """Up to four layers that run one after the other; equal groups share a region.

    Each layer is an attribute of its own, because the key of a region is made of attributes.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.local: bool = layers[0].local
        self.recurrent = False  # models with such layers are not grouped
        self.first, self.second, self.third, self.fourth = (*layers, None, None, None)[:4]

    def __call__(self, x: Any, residual: Any, rotary: Any, attn: Any) -> Any:
        for layer in (self.first, self.second, self.third, self.fourth):
            if layer is not None:
                x, residual = layer(x, residual, rotary, attn)
        return x, residual


def group_layers(layers: Sequence[Any], size: int) -> list[Any]:
    """Returns ``layers`` in groups of ``size`` neighbours that have the same window; those left over are alone."""
    groups: list[Any] = []
    start = 0
    while start < len(layers):
        some = layers[start : start + size]
        if len(some) == size > 1 and all(layer.local == some[0].local for layer in some):
            groups.append(LayerGroup(some))
            start += size
        else:
            groups.append(layers[start])
            start += 1
    return groups
