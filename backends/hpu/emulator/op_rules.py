"""Checks of every operation on the emulated device, and results of operations on tensors without values.

Shapes, strides and dtypes of results are cached by the shapes that go in: torch computes them by Python code that takes
longer than the operation, and a warm-up repeats the same ones many times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator import emulated_errors
from trencadis.backends.hpu.emulator.device_tensor import NODES, DeviceTensor, flatten, rebuild

aten = torch.ops.aten
BOOLS = (torch.bool, torch.uint8)
MASKED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default, aten.is_nonzero.default)
COPIES = (aten.index_copy_.default, aten.index_copy.default)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GARBAGE = 101
"""What integers hold that several rows of one ``index_copy`` have written."""

NO_FLOAT8 = 0x7F
"""The code of NaN in both 8-bit floats."""

INDEXED = {
    aten.index_select.default: (1, 2),
    aten.index_copy_.default: (1, 2),
    aten.index_copy.default: (1, 2),
    aten.index_reduce.default: (1, 2),
    aten.index_add_.default: (1, 2),
    aten.index_reduce_.default: (1, 2),
    aten.gather.default: (1, 2),
    aten.scatter_add.default: (1, 2),
    aten.scatter.src: (1, 2),
    aten.scatter.value: (1, 2),
}
"""Operation -> (index of the dimension, index of the indices) among its arguments."""


def check_call(func: Any, args: Any, leaves: list[Any], capture: bool) -> None:
    """Raises for calls that are wrong whatever their values are."""
    name = str(func)
    tags = func.tags
    if func in READS or torch.Tag.data_dependent_output in tags:
        raise emulated_errors.host_read(name)
    if func in MASKED and any(isinstance(i, Tensor) and i.dtype in BOOLS for i in args[1]):
        raise emulated_errors.boolean_mask(name)
    if torch.Tag.dynamic_output_shape in tags and func not in MASKED:
        raise emulated_errors.dynamic_shape(name)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim() > 0:
            raise emulated_errors.host_mixed(name)
    if capture:
        for target in find_mutated_args(func, args):
            if isinstance(target, DeviceTensor) and target.is_view:
                raise emulated_errors.view_update(name)


def find_mutated_args(func: Any, args: Any) -> list[Any]:
    """Returns the arguments that ``func`` updates in place."""
    positions = _argument_positions(func)
    return [args[i] for i in positions if i < len(args)]


@cache
def _argument_positions(func: Any) -> tuple[int, ...]:
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(i)
    return tuple(found)


@cache
def check_indices(func: Any) -> Callable[..., Any]:
    """Wraps ``func`` so that its indices are checked when it runs.

    On a device an index out of range reads other memory.
    """
    if func in MASKED:

        def by_lists(*args: Any, **kwargs: Any) -> Any:
            for dim, index in enumerate(args[1]):
                if index is not None:
                    _require_in_range(func, index, args[0].shape[dim])
            return func(*args, **kwargs)

        return by_lists
    if func in INDEXED:
        dim_at, index_at = INDEXED[func]

        def by_dim(*args: Any, **kwargs: Any) -> Any:
            _require_in_range(func, args[index_at], args[0].shape[args[dim_at]])
            if func in COPIES:
                args = _spoil_duplicates(args)
            return _copy_float8(func, args) if func in COPIES and args[0].dtype in FLOAT8 else func(*args, **kwargs)

        return by_dim
    plain: Callable[..., Any] = func
    return plain


def _spoil_duplicates(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of ``index_copy`` with no value for an index that occurs more than once.

    On a card any of its rows may win, or parts of several: only rows that nothing reads may be written twice.
    """
    target, dim, index, source = args
    if index.is_meta or index.numel() < 2:
        return args
    _, place, count = index.unique(return_inverse=True, return_counts=True)
    twice = (count > 1)[place]
    if not bool(twice.any()):
        return args
    wide = source.dtype.is_floating_point and source.dtype not in FLOAT8
    shape = [-1 if i == dim else 1 for i in range(source.dim())]
    nothing = torch.full((), float("nan") if wide else GARBAGE, dtype=torch.float32).to(source.dtype)
    if source.dtype in FLOAT8:  # torch selects bytes of them alone
        codes = torch.where(twice.view(shape), torch.full((), NO_FLOAT8, dtype=torch.uint8), source.view(torch.uint8))
        return target, dim, index, codes.view(source.dtype)
    return target, dim, index, torch.where(twice.view(shape), nothing, source)


def _copy_float8(func: Any, args: tuple[Any, ...]) -> Tensor:
    """Runs ``index_copy`` on 8-bit floats as bytes, the only form in which the host has it."""
    target, dim, index, source = args
    found: Tensor = func(target.view(torch.uint8), dim, index, source.view(torch.uint8))
    return target if func is aten.index_copy_.default else found.view(target.dtype)


def _require_in_range(func: Any, index: Tensor, size: int) -> None:
    if index.is_meta or index.numel() == 0:
        return
    low, high = (int(t) for t in index.aminmax())
    if low < 0 or high >= size:
        raise emulated_errors.negative_index(str(func))


def is_view(func: Any) -> bool:
    """Returns True if an ATen call changes nothing and returns the memory of an argument."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


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
    if isinstance(tree, dict):
        return tuple([(name, _key(value)) for name, value in tree.items()])
    if isinstance(tree, NODES):
        return (type(tree), *[_key(item) for item in tree])
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
