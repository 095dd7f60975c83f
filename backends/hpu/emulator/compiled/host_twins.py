"""Maps between device tensors and the host tensors that the compiler traces in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator.device_tensor import DeviceTensor
from trencadis.backends.hpu.emulator.protocols import TensorOwner
from trencadis.backends.hpu.hccl_comm import HpuComm
from trencadis.backends.hpu.ops import HpuOps

KEPT = (HpuOps, HpuComm, TensorOwner, torch.device, torch.dtype, str, int, float)
"""Types of objects without tensors of their own, which the compiler gets unchanged."""

SKIPPED = ("ops", "comm", "backend", "config")


class HostTwins:
    """Maps host tensors that the compiler traces to the device tensors that they stand for, for one call."""

    def __init__(self) -> None:
        self.tensors: dict[int, DeviceTensor] = {}
        self.storages: dict[int, DeviceTensor] = {}
        self._memo: dict[int, Any] = {}
        self._alive: list[Tensor] = []

    def of(self, value: Any) -> Any:
        """Returns ``value`` with host tensors in place of device tensors, in tuples, functions and objects of any
        depth.
        """
        if isinstance(value, DeviceTensor):
            return self.host(value)
        if isinstance(value, tuple):
            made = [self.of(item) for item in value]
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if isinstance(value, list):
            return [self.of(item) for item in value]
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, FunctionType):
            return self._function(value)
        return self._object(value)

    def host(self, tensor: DeviceTensor) -> Tensor:
        """Returns the host tensor inside ``tensor``; one without values gets unwritten memory, for the compiler's
        guards.
        """
        found = tensor.held
        if found.is_meta and tensor.owner.computes:
            known = self._memo.get(id(tensor))
            if known is not None:
                return known  # type: ignore[no-any-return]
            found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            self._memo[id(tensor)] = found
        self.pair(found, tensor)
        return found

    def pair(self, host: Tensor, tensor: DeviceTensor) -> None:
        """Records that ``host`` stands for ``tensor``."""
        self.tensors[id(host)] = tensor
        self.storages.setdefault(host.untyped_storage()._cdata, tensor)
        self._alive.append(host)

    def back(self, host: Tensor) -> DeviceTensor | None:
        """Returns the device tensor of ``host``, or a view of the device tensor whose memory ``host`` is a view of;
        else None.
        """
        found = self.tensors.get(id(host))
        if found is not None:
            return found
        base = self.storages.get(host.untyped_storage()._cdata)
        if base is None:
            return None
        made = DeviceTensor(host, base.store, base.owner, is_view=True)
        if base.held.is_meta:
            view = torch.empty(0, dtype=host.dtype, device="meta")
            made.held = view.set_(base.store.meta_storage(), host.storage_offset(), host.size(), host.stride())
        return made

    def _function(self, value: FunctionType) -> Any:
        cells = value.__closure__
        if not cells:
            return value
        made = tuple(CellType(self.of(cell.cell_contents)) for cell in cells)
        return FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, made)

    def _object(self, value: Any) -> Any:
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        if not names or isinstance(value, (*KEPT, type)) or type(value).__module__.startswith("torch"):
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        made = self._memo[id(value)] = copy.copy(value)
        for name in names:
            if name not in SKIPPED:
                object.__setattr__(made, name, self.of(getattr(value, name)))
        return made


Twin = Callable[..., Any]
