"""Nested tuples of a launch's arrays or tensors: their leaves, and the same tuples over other leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of nested tuples, in order, without None."""
    if tree is None:
        return []
    if isinstance(tree, tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def rebuild(tree: Any, make: Callable[[Any], Any]) -> Any:
    """Returns ``tree`` with ``make`` applied to its arrays or tensors; named tuples keep their type."""
    if isinstance(tree, tuple):
        kind: Any = type(tree)
        return kind(*(None if item is None else rebuild(item, make) for item in tree))
    assert isinstance(tree, np.ndarray | Tensor)
    return make(tree)
