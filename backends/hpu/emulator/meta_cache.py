"""What operations make of tensors without values: shapes, strides and types, remembered by the shapes that go in.

torch finds them by Python code that costs more than the operation; a warm-up meets the same ones again and again.
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
"""Results that are remembered; then it begins anew."""


@dataclass(frozen=True, slots=True)
class MetaResult:
    """A result with a storage of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> MetaResult:
        """What ``tensor`` looks like."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def make(self) -> Tensor:
        """Such a tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=META)


class MetaCache:
    """Runs functions on meta tensors, or repeats what they gave.

    A result that shares a storage with an argument (a view, an update in place) is made by the function each time.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, whose arguments hold no values."""
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
"""Shapes do not depend on the card, so all cards of a process share what is known."""


def _key(tree: Any) -> Hashable:
    if isinstance(tree, Tensor):
        return (tree.shape, tree.stride(), tree.dtype)
    if isinstance(tree, list | tuple):
        return (type(tree), *(_key(item) for item in tree))
    if isinstance(tree, dict):
        return tuple((name, _key(value)) for name, value in tree.items())
    return (type(tree), tree)


def _describe_result(raw: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """What ``raw`` is made of, if it can be made again; None: the function must run."""
    taken = {leaf.untyped_storage()._cdata for leaf in flatten((args, kwargs)) if isinstance(leaf, Tensor)}
    for leaf in flatten(raw):
        if not isinstance(leaf, Tensor):
            return None
        storage = leaf.untyped_storage()
        if storage._cdata in taken or storage.nbytes() != MetaResult.like(leaf).make().untyped_storage().nbytes():
            return None
        taken.add(storage._cdata)
    return (rebuild(raw, MetaResult.like),)
