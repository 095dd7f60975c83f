"""A tensor on the emulated device: a wrapper around a host tensor that only the device may touch.

It uses torch's ``lazy`` device type, which every build of torch knows and no backend here uses, so that
``torch.zeros(..., device=d)``, ``.to(d)`` and ``.cpu()`` reach the emulator as they would reach a device.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator import emulated_errors
from trencadis.backends.hpu.emulator.allocator import Allocator, LiveBytes, Store
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import Profile
from trencadis.backends.hpu.emulator.emulated_recipe_cache import Clock


@runtime_checkable
class TensorOwner(Protocol):
    """The part of the device that its tensors use."""

    computes: bool

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one ATen call."""
        ...


class LaunchHost(TensorOwner, Protocol):
    """The part of the device that a launch uses."""

    lazy: bool
    profile: Profile
    clock: Clock
    allocator: Allocator
    scope: Any
    """The launch that is open; the launch sets it to None when it ends."""


class RecordedValue(Protocol):
    """A value in the recording that made it."""

    @property
    def recording(self) -> Any: ...

    @property
    def index(self) -> int: ...


class RecipeScope(Protocol):
    """The part of the open launch that a repeated layer uses."""

    live: LiveBytes
    collective: int

    def collect(self, row: Hashable) -> None:
        """Adds an operation's row to the recipe."""
        ...

    def cut(self) -> None:
        """Ends the recipe."""
        ...


DEVICE = torch.device("lazy")

MISSING = (
    torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip
"""Types that no list of the bridge names for a card."""


class DeviceTensor(Tensor):
    """A tensor of the device. Values are in ``held`` (a CPU tensor, or a meta tensor without values), which only the
    device reads.
    """

    held: Tensor
    store: Store
    owner: TensorOwner
    slot: RecordedValue | None
    is_view: bool
    aliases: bool
    """True for a view that is one by its operation's schema, too: not the result of ``_unsafe_view``."""

    @staticmethod
    def __new__(cls, held: Tensor, store: Store, owner: TensorOwner, is_view: bool) -> DeviceTensor:
        if held.dtype in MISSING:
            raise emulated_errors.missing_type(held.dtype)
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held, made.store, made.owner, made.slot, made.is_view = held, store, owner, None, is_view
        made.aliases = is_view
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        owner = next(t.owner for t in flatten((args, kwargs)) if isinstance(t, DeviceTensor))
        return owner.dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        raise emulated_errors.host_read("numpy")

    def tolist(self) -> Any:
        raise emulated_errors.host_read("tolist")

    def data_ptr(self) -> int:
        raise emulated_errors.host_read("data_ptr")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise emulated_errors.host_read("numpy.asarray")


NODES = (tuple, list, dict)
"""Types of a tree's inner nodes; a constant, since every emulated operation walks its arguments several times."""


def flatten(tree: Any) -> list[Any]:
    """Returns the leaves of nested tuples, lists and dicts, in order."""
    if not isinstance(tree, NODES):
        return [tree]
    found: list[object] = []
    for item in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(item, NODES):
            found += flatten(item)
        else:
            found.append(item)
    return found


def rebuild(tree: Any, leaf: Any) -> Any:
    """Returns ``tree`` with ``leaf`` applied to every leaf, in the order of ``flatten``."""
    if not isinstance(tree, NODES):
        return leaf(tree)
    if isinstance(tree, dict):
        return {key: rebuild(value, leaf) for key, value in tree.items()}
    made = [rebuild(item, leaf) if isinstance(item, NODES) else leaf(item) for item in tree]
    kind = type(tree)
    return kind(*made) if hasattr(tree, "_fields") else kind(made)
