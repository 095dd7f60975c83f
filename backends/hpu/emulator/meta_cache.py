"""Results of operations on tensors without values: shapes, strides and dtypes, cached by the shapes that go in.

torch computes them by Python code that takes longer than the operation; a warm-up repeats the same ones many times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator.device_tensor import flatten, rebuild

META = torch.device("meta")
MOST = 100_000
"""Maximum number of cached results; then the cache is cleared."""


@dataclass(frozen=True, slots=True)
class MetaResult:
    """A result with a storage of its own: its shape, strides and dtype."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> MetaResult:
        """Returns the description of ``tensor``."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        """Returns a meta tensor of this description."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=META)


class MetaCache:
    """Runs functions on meta tensors, or returns cached results.

    A result that shares a storage with an argument (a view, an update in place) is made by the function each time.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns ``function(*args, **kwargs)``, whose arguments hold no values."""
        key = (function, _key(args), _key(kwargs))
        found = self._known.get(key)
        if found is not None:
            return rebuild(found[0], lambda leaf: leaf.make() if isinstance(leaf, MetaResult) else leaf)
        raw = function(*args, **kwargs)
        if key not in self._known:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = _describe_result(raw, args, kwargs)
        return raw


META_CACHE = MetaCache()
"""Shapes do not depend on the card, so all cards of a process share one cache."""


def _key(tree: Any) -> Hashable:
    if isinstance(tree, Tensor):
        return (tree.shape, tree.stride(), tree.dtype)
    if isinstance(tree, list | tuple):
        return (type(tree), *(_key(item) for item in tree))
    if isinstance(tree, dict):
        return tuple((name, _key(value)) for name, value in tree.items())
    return (type(tree), tree)


def _describe_result(raw: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """Returns the description of ``raw``, from which it can be made again; None: the function must run each time."""
    taken = {leaf.untyped_storage()._cdata for leaf in flatten((args, kwargs)) if isinstance(leaf, Tensor)}
    for leaf in flatten(raw):
        if not isinstance(leaf, Tensor):
            return None
        storage = leaf.untyped_storage()
        if storage._cdata in taken or storage.nbytes() != MetaResult.like(leaf).make().untyped_storage().nbytes():
            return None
        taken.add(storage._cdata)
    return (rebuild(raw, MetaResult.like),)
