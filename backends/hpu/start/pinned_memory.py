"""Pinned host memory: which way of making it a plug-in offers, found once when a card is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("trencadis.engine")

Pin = Callable[[Tensor], Tensor]

REFUSED = "hpu: pinned memory is refused ({why}); copies go through ordinary memory and block"


class Pinning(NamedTuple):
    """How host memory for copies is made.

    Args:
        pin: returns a copy of a host tensor in memory for copies.
        pinned: True if that memory is pinned, so that copies need not block.
        note: a line for the user; "" if there is nothing to say.
    """

    pin: Pin
    pinned: bool = True
    note: str = ""


def find_pinning(device: str = "hpu") -> Pinning:
    """Tries the ways of pinning memory and returns the first that works: ``pin_memory("hpu")``, ``pin_memory()``, else
    ordinary memory.
    """
    ways: tuple[Pin, ...] = (lambda tensor: tensor.pin_memory(device), lambda tensor: tensor.pin_memory())
    why = ""
    for way in ways:
        try:
            made = way(torch.arange(4, dtype=torch.int32))
            if made.tolist() == [0, 1, 2, 3]:
                return Pinning(way)
            why = why or "it holds other values"
        except (RuntimeError, TypeError, NotImplementedError, AssertionError, ValueError) as error:
            why = why or next(iter(str(error).splitlines()), type(error).__name__)[:120]
    return Pinning(lambda tensor: tensor.detach().clone(), False, REFUSED.format(why=why))
