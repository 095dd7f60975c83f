"""The emulated device: checks every operation, runs it on values or on meta tensors, and accounts for memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.emulator import emulated_errors
from trencadis.backends.hpu.emulator.allocator import Allocator, Store
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import OpTable, Profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE, DeviceTensor, flatten, rebuild
from trencadis.backends.hpu.emulator.emulated_copies import DeviceQueue, Transfers, check_int32
from trencadis.backends.hpu.emulator.emulated_recipe_cache import Clock
from trencadis.backends.hpu.emulator.injected_faults import EmulatedFaults
from trencadis.backends.hpu.emulator.launch_recording_and_replay import CaptureRecording, Scope, leaf_key
from trencadis.backends.hpu.emulator.op_rules import META_CACHE, check_call, check_indices, find_mutated_args, is_view

aten = torch.ops.aten
SPARSE = 64 << 20
"""Tensors of more bytes are mapped without being backed: only pages that are written use host memory."""

HOST, META = torch.device("cpu"), torch.device("meta")


class EmulatedDevice:
    """One card.

    Args:
        computes: True: tensors hold values; False: torch's meta device, for plans and ledgers of models of any size.
        lazy: lazy mode; False: compile mode.
    """

    def __init__(self, profile: Profile, computes: bool = True, faults: EmulatedFaults | None = None) -> None:
        self.profile, self.computes, self.lazy = profile, computes, True
        self.table = OpTable(profile.column)
        self.faults = faults or EmulatedFaults()
        self.clock = Clock(profile)
        self.allocator = Allocator(profile)
        self.queue = DeviceQueue(self.faults.pending)
        self.transfers = Transfers(self.queue, computes)
        self.scope: Scope | None = None
        self.compile_only = False
        self.hccl_memory = True
        """False: the pool holds all of the card's memory, so that HCCL gets none for its buffers."""
        self.graphs: list[Any] = []
        """The graphs that compile mode made, in order (``compiled.graph_passes.Lowered``)."""
        self._stores: dict[int, Store] = {}

    def launch(self, recording: CaptureRecording | None = None, kind: str = "") -> Scope:
        """Opens the scope of one run, or of one capture; ``kind``: the kind of fault that may be injected."""
        assert self.scope is None, "launches do not nest"
        meta = recording is not None or self.compile_only or not self.computes
        self.begin_launch(kind or ("step" if recording is None else "capture"))
        if self.compile_only and recording is None:
            self.faults.reach("compile", self.allocator.free)
        self.scope = Scope(self, recording, meta)
        return self.scope

    def begin_launch(self, kind: str) -> None:
        """Starts a launch or capture: runs everything queued before it and applies injected faults."""
        self.queue.wait()
        self.faults.reach(kind, self.allocator.free)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Enters compile-only mode: launches make recipes and compute nothing, replays do nothing."""
        before, self.compile_only = self.compile_only, True
        try:
            yield
        finally:
            self.compile_only = before

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one ATen call from Python."""
        leaves = flatten((args, kwargs))
        if self.scope is None:
            for target in find_mutated_args(func, args):
                self.rewrite(target, str(func))
        if func is aten._to_copy.default or func is aten.copy_.default:
            moved = self._move(func, args, kwargs)
            if moved is not None:
                return moved
        on_device = any(isinstance(t, DeviceTensor) for t in leaves) or kwargs.get("device") == DEVICE
        if not on_device:
            return func(*args, **kwargs)
        if self.scope is None and func is aten.empty.memory_format:
            return self.empty(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
        if self.scope is None and func is aten.zero_.default and args[0].store.untouched:
            self.clock.run_alone(None)
            return args[0]
        capture = self.scope is not None and self.scope.recording is not None
        check_call(func, args, leaves, capture)
        if self.scope is None or not self.scope.silent:
            types = (t.dtype for t in leaves if isinstance(t, DeviceTensor))
            why = self.table.fallback(func, types, not self.lazy)
            if why:
                self._on_the_host(str(func), why, leaves, capture)
        function, name = check_int32(check_indices(func), str(func)), str(func)
        if self.scope is None and not is_view(func):
            self._run_alone(name, leaves)
        return (self._apply if self._is_free(func) else self.execute)(function, name, args, kwargs)

    def _is_free(self, func: Any) -> bool:
        """Returns True for a view that Python takes between two compiled graphs: nothing is computed, so it has no
        recipe.
        """
        between = self.scope is not None and not (self.lazy or self.scope.silent or self.scope.region)
        return between and is_view(func)

    def _on_the_host(self, name: str, why: str, leaves: list[Any], capture: bool) -> None:
        """Counts and charges an operation that the bridge sends to the host's CPU; raises Refused in a capture."""
        if capture:
            raise emulated_errors.fallback_in_capture(name, why)
        moved = sum(t.numel() * t.element_size() for t in leaves if isinstance(t, DeviceTensor))
        self.clock.add_seconds(moved / self.profile.host_copy)
        self.clock.count_event("cpu_fallback", f"{name}: {why}: {emulated_errors.line_of_code()}")

    def kernel(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a fused operation: computed by plain torch, counted as one operation on the device."""
        for leaf in flatten((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor):
                raise emulated_errors.host_mixed(function.__name__)
        if self.scope is None:
            return self.execute(function, function.__name__, args, kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            return self.execute(function, function.__name__, args, kwargs)

    def execute(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Runs one operation, which is a part of the open launch's recipe."""
        if self.scope is None:
            self.queue.wait()
        else:
            self.scope.add(name, args, kwargs)
        return self._apply(function, name, args, kwargs)

    def _run_alone(self, name: str, leaves: list[Any]) -> None:
        """Counts an operation outside of launches, copies on the card included: in lazy mode it is a recipe, per
        offset of the views that it reads.
        """
        offsets = tuple(t.storage_offset() for t in leaves if isinstance(t, DeviceTensor))
        self.clock.run_alone(("alone", name, offsets, *map(leaf_key, leaves)) if self.lazy else None)

    def _apply(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Runs ``function`` on inner tensors and wraps what comes out."""
        scope = self.scope
        meta = not self.computes or (scope is not None and scope.on_meta)
        inputs: dict[int, DeviceTensor] = {}
        stores: dict[int, Store] = {}

        def inner(leaf: Any) -> Any:
            if isinstance(leaf, torch.device) and leaf == DEVICE:
                return META if meta else HOST
            if not isinstance(leaf, DeviceTensor):
                return leaf
            leaf.store.untouched = False
            found = self._meta_tensor(leaf) if meta else self._values(leaf, name)
            inputs[id(found)] = leaf
            stores[found.untyped_storage()._cdata] = leaf.store
            return found

        inner_args, inner_kwargs = rebuild(args, inner), rebuild(kwargs, inner)
        with torch.no_grad():
            call = META_CACHE.call if meta else _call
            raw = call(function, inner_args, inner_kwargs)

        def outer(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in inputs:
                same = inputs[id(leaf)]
                if same.shape != leaf.shape:
                    raise emulated_errors.resized_tensor(name)
                return same
            store = stores.get(leaf.untyped_storage()._cdata)
            live = scope.live if scope is not None else None
            owned = store or Store(self.allocator, leaf.untyped_storage().nbytes(), live)
            found = DeviceTensor(leaf, owned, self, is_view=store is not None)
            found.aliases = found.is_view and "_unsafe_view" not in name
            return found

        out = rebuild(raw, outer)
        if scope is not None and self.computes:
            made = [leaf for leaf in flatten(out) if isinstance(leaf, DeviceTensor)]
            scope.measure(name, list(inputs.values()), made)
        if scope is not None and scope.recording is not None:
            scope.recording.record(function, _host_devices(args), _host_devices(kwargs), out)
        return out

    def layer(self, run: Callable[..., Any], *args: Any) -> Any:
        """Runs one layer of a stack. Without values an equal layer is not run again: its recorded figures are added."""
        if self.computes or self.scope is None:
            return run(*args)
        return self.scope.layer_reuse.layer(self.scope, run, args)

    def rewrite(self, target: Any, name: str) -> None:
        """Handles a write to ``target``: refused in a capture if it is a view; between launches it rewrites a view's
        whole tensor.

        Raises:
            Refused: a view in a capture, or a view of a tensor that a graph has captured.
        """
        if not self.lazy or not isinstance(target, DeviceTensor) or not target.is_view:
            return
        if self.scope is not None:
            if self.scope.recording is not None:
                raise emulated_errors.view_update(name)
            return
        if target.store.captured:
            raise emulated_errors.new_version(name)
        self.clock.run_alone(("inserted", name, target.storage_offset(), target.store.bytes, leaf_key(target)))
        self.clock.charge_copy(target.store.bytes)

    def prepare_send(self, source: Any, name: str) -> None:
        """Prepares ``source`` for a collective or a fetch between launches: in lazy mode a view is first copied, by a
        recipe.
        """
        if self.scope is None and self.lazy and isinstance(source, DeviceTensor) and source.is_view:
            self.clock.run_alone(("taken out", name, source.storage_offset(), leaf_key(source)))

    def cut(self) -> None:
        """``mark_step``: ends the recipe that is being collected."""
        if self.scope is not None:
            self.scope.cut()

    def upload(self, source: Tensor, dtype: torch.dtype, non_blocking: bool) -> DeviceTensor:
        """Copies a host tensor to the device and returns the copy."""
        target = self.empty(tuple(source.shape), dtype)
        target.store.untouched = False
        self.transfers.upload(target, source, non_blocking)
        return target

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> DeviceTensor:
        """Returns zeros; large tensors are backed page by page when written."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        store = Store(self.allocator, count, None)
        store.untouched = True
        if not self.computes:
            inner = torch.empty(shape, dtype=dtype, device=META)
        elif count > SPARSE:
            pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
            inner = torch.frombuffer(pages, dtype=dtype).view(shape)
        else:
            inner = torch.zeros(shape, dtype=dtype)
        return DeviceTensor(inner, store, self, is_view=False)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies between host and device; returns None if ``func`` stays on one side."""
        name, non_blocking = str(func), bool(kwargs.get("non_blocking"))
        if func is aten._to_copy.default:
            source, target, dtype = args[0], kwargs.get("device"), kwargs.get("dtype") or args[0].dtype
            if target == DEVICE and not isinstance(source, DeviceTensor):
                if self.scope is not None:
                    raise emulated_errors.host_values(name)
                return self.upload(source, dtype, non_blocking)
            if isinstance(source, DeviceTensor) and target not in (None, DEVICE):
                return self._download(source, dtype, name, non_blocking)
            return None
        target, source = args[0], args[1]
        non_blocking = non_blocking or (len(args) > 2 and bool(args[2]))
        if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
            if self.scope is not None or not isinstance(target, DeviceTensor):
                return None
            self._run_alone(name, [target, source])
            self.transfers.copy_on_device(target, source, non_blocking)
            return target
        if self.scope is not None:
            if isinstance(target, DeviceTensor) and source.dim() == 0:
                return None
            raise (
                emulated_errors.host_values(name)
                if isinstance(target, DeviceTensor)
                else emulated_errors.host_read_inside(name)
            )
        if isinstance(target, DeviceTensor):
            self.transfers.upload(target, source, non_blocking)
        else:
            self.prepare_send(source, name)
            self.transfers.download(target, source, non_blocking)
        return target

    def _download(self, source: DeviceTensor, dtype: torch.dtype, name: str, non_blocking: bool) -> Tensor:
        if self.scope is not None:
            raise emulated_errors.host_read_inside(name)
        if self.computes:
            self._values(source, name)
        target = torch.empty(source.shape, dtype=dtype)
        self.prepare_send(source, name)
        self.transfers.download(target, source, non_blocking)
        return target

    def _values(self, tensor: DeviceTensor, name: str) -> Tensor:
        if tensor.held.is_meta:
            raise emulated_errors.no_values(name)
        return tensor.held

    def _meta_tensor(self, tensor: DeviceTensor) -> Tensor:
        """Returns the tensor without values; views of one storage share one meta storage."""
        if tensor.held.is_meta:
            return tensor.held
        twin = torch.empty(0, dtype=tensor.dtype, device=META)
        return twin.set_(tensor.store.meta_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


NORESERVE = 0x4000 if hasattr(mmap, "MAP_ANONYMOUS") else 0
"""Linux's MAP_NORESERVE, which the mmap module does not name before Python 3.13."""


def _host_devices(tree: Any) -> Any:
    """Replaces the device in arguments by the host, which holds the values when a launch is replayed."""
    return rebuild(tree, lambda leaf: HOST if isinstance(leaf, torch.device) and leaf == DEVICE else leaf)
