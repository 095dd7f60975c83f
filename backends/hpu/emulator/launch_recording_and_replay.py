"""The scope of a launch: sees every operation of a body, also on host tensors, and records the captured ones.

A layer of a stack takes (x, residual) and returns two tensors of the same shapes. Without values, a second one of the
same kind and weights' shapes adds the same rows to the recipe and needs the same memory above what is held already: its
figures repeat, so it needs no run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.backends.hpu.emulator import emulated_errors
from trencadis.backends.hpu.emulator.allocator import LiveBytes, Store
from trencadis.backends.hpu.emulator.device_tensor import (
    NODES,
    DeviceTensor,
    LaunchHost,
    RecipeScope,
    flatten,
    rebuild,
)
from trencadis.backends.hpu.emulator.emulated_recipe_cache import LaunchCounts

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSlot:
    """A value that the recording makes."""

    recording: CaptureRecording
    index: int


@dataclass(slots=True)
class RecordedCall:
    """One operation: ``args`` and ``kwargs`` hold RecordedSlots, outside tensors and constants; ``made`` its outputs.

    Args:
        line: the line of code that called it.
        last: slots that nothing reads after this call.
        slots: positions in ``args`` -> slots; None: some stand inside of lists or ``kwargs``.
    """

    function: Function
    args: Any
    kwargs: Any
    made: list[int | None]
    line: str
    last: list[int] = field(default_factory=list)
    slots: dict[int, int] | None = None

    def run(self, values: list[Tensor | None]) -> object:
        """Calls the operation on the ``values`` of slots."""

        def value(leaf: Any) -> Any:
            return values[leaf.index] if isinstance(leaf, RecordedSlot) else leaf

        if self.slots is None:
            return self.function(*rebuild(self.args, value), **rebuild(self.kwargs, value))
        args = list(self.args)
        for position, slot in self.slots.items():
            args[position] = values[slot]
        return self.function(*args, **self.kwargs)

    def find_slots(self) -> dict[int, int] | None:
        """Returns ``slots``."""
        nested = [item for item in self.args if isinstance(item, NODES)]
        if any(isinstance(leaf, RecordedSlot) for leaf in flatten((nested, self.kwargs))):
            return None
        return {i: item.index for i, item in enumerate(self.args) if isinstance(item, RecordedSlot)}


class CaptureRecording:
    """A captured launch."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.count = 0
        self.outputs: list[tuple[DeviceTensor, int]] = []

    def __len__(self) -> int:
        return len(self.calls)

    def record(self, function: Function, args: Any, kwargs: Any, out: Any) -> None:
        """Adds a call.

        Device tensors made before in this recording become slots; others keep their place on the device.
        """
        line = emulated_errors.line_of_code()
        call = RecordedCall(function, rebuild(args, self._reference), rebuild(kwargs, self._reference), [], line)
        known = {id(leaf) for leaf in flatten((args, kwargs))}
        for leaf in flatten(out):
            if not isinstance(leaf, DeviceTensor) or id(leaf) in known:
                call.made.append(None)
                continue
            leaf.slot = RecordedSlot(self, self.count)
            call.made.append(self.count)
            self.count += 1
        self.calls.append(call)

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, DeviceTensor):
            return leaf
        if leaf.slot is not None and leaf.slot.recording is self:
            return leaf.slot
        if leaf.owner.computes and leaf.held.is_meta:
            raise emulated_errors.no_values("capture")
        leaf.store.captured = True
        return leaf.held

    def finish(self, outputs: list[DeviceTensor]) -> int:
        """Fixes the outputs, which get storages of their own; returns their bytes."""
        total = 0
        for tensor in outputs:
            if tensor.slot is None or tensor.slot.recording is not self:
                continue
            if tensor.owner.computes:
                tensor.held = torch.zeros(tensor.shape, dtype=tensor.dtype)
            self.outputs.append((tensor, tensor.slot.index))
            total += tensor.numel() * tensor.dtype.itemsize
            tensor.store.keep()
        kept = {index for _, index in self.outputs}
        seen: set[int] = set()
        for call in reversed(self.calls):
            read = {leaf.index for leaf in flatten((call.args, call.kwargs)) if isinstance(leaf, RecordedSlot)}
            made = {index for index in call.made if index is not None}
            call.last = sorted((read | made) - seen - kept)
            call.slots = call.find_slots()
            seen |= read | made
        return total

    def replay(self) -> None:
        """Runs the calls on the current contents of the outside tensors; outputs are overwritten in place."""
        values: list[Tensor | None] = [None] * self.count
        for call in self.calls:
            try:
                out = call.run(values)
            except emulated_errors.Refused as refused:
                raise refused.at(call.line) from None
            for index, made in zip(call.made, flatten(out), strict=True):
                if index is not None:
                    values[index] = made
            for index in call.last:
                values[index] = None
        for tensor, index in self.outputs:
            made_now = values[index]
            assert made_now is not None
            tensor.held.copy_(made_now)


PAIR = 2
"""Tensors that a layer returns if nothing of it is read by later layers."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A row of a recording that stands for ``mark_step``; ``fresh``: the layer's own bytes that cross this cut
    first.
    """

    fresh: int


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """Figures of one layer.

    Args:
        rows: rows of the recipe and cuts, in order.
        peak: its peak bytes above those held before.
        left: bytes that are alive after it and have crossed no cut yet.
        collective: bytes of results of its collectives, which a graph always keeps.
    """

    rows: tuple[Hashable, ...]
    peak: int
    left: int
    collective: int

    @property
    def cut(self) -> bool:
        """True if there is a cut inside the layer."""
        return any(isinstance(row, LayerCut) for row in self.rows)


class LayerReuse:
    """The distinct layers of one launch."""

    def __init__(self) -> None:
        self._known: dict[Hashable, LayerRecord] = {}
        self._rows: list[Hashable] | None = None
        self._base = 0
        self._left = -1
        """Number of cuts before the outputs of the last layer, if these are alive and have crossed none; else -1."""

    def note(self, row: Hashable) -> None:
        """Adds a row to the open recording, if there is one."""
        if self._rows is not None:
            self._rows.append(row)

    def cut(self, fresh: int) -> None:
        """Adds a cut to the open recording, if there is one."""
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
        pair = isinstance(out, tuple) and len(out) == PAIR
        if pair and [leaf_key(t) for t in out] == [leaf_key(t) for t in args[:PAIR]]:
            self._known[key] = LayerRecord(tuple(rows), peak, left, scope.collective - summed)
        self._left = live.cuts
        return out

    def _reuse(self, scope: RecipeScope, known: LayerRecord, args: tuple[Any, ...]) -> Any:
        live = scope.live
        live.peak = max(live.peak, live.now + known.peak)
        fresh = self._left == live.cuts  # the inputs are freed when the layer's outputs replace them
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


PRODUCTS = ("mm", "linear", "matmul", "sdpa", "parts", "gemm", "experts")
"""Parts of the names of operations that multiply matrices."""

ADDING = ("addmm", "addbmm", "baddbmm")
"""Parts of the names of those whose first tensor is added to the product."""

PLAIN = (int, float, bool, str, torch.dtype)
"""Types of arguments that are their own key."""

PLAIN_KINDS = int | float | str | bool | None
"""Types of attributes that are their own key."""


def leaf_key(leaf: Any) -> Hashable:
    """Returns the key of one argument. Strides are left out: torch's meta kernels lay some results out otherwise than
    the CPU's.
    """
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, PLAIN) or leaf is None else str(leaf)


def signature(layer: Any) -> Hashable:
    """Returns the class of a layer and the key of each of its attributes: shapes of tensors, numbers, functions,
    parts.
    """
    found: list[Hashable] = [type(layer).__qualname__]
    for name, value in vars(layer).items():
        known = isinstance(value, Tensor | tuple | list | PLAIN_KINDS) or hasattr(value, "__dict__")
        if known and name not in ("ops", "comm"):
            found.append((name, _attribute_key(value)))
    return tuple(found)


def _attribute_key(value: object) -> Hashable:
    """Returns the key of an attribute; that of a part, also in a tuple or a list, is its signature."""
    if isinstance(value, tuple | list):
        return tuple(map(_attribute_key, flatten(value)))
    if isinstance(value, FunctionType | MethodType):
        return value.__qualname__
    if hasattr(value, "__dict__") and not isinstance(value, Tensor | PLAIN_KINDS):
        return signature(value)
    return leaf_key(value)


@dataclass(frozen=True, slots=True)
class ResultForm:
    """A tensor that a region returns in memory of its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True, slots=True)
class ArgumentIndex:
    """A tensor that a region returns as it came: its index among the leaves of the arguments."""

    index: int


@dataclass(slots=True)
class RegionRecord:
    """A region that ran without values: the rows of its recipe, its peak bytes above those held before, and its
    results, with ``ResultForm`` and ``ArgumentIndex`` in place of tensors.
    """

    rows: tuple[Hashable, ...]
    peak: int
    out: object


class RegionRecords:
    """The compiled regions that have run on a card without values: one that ran on arguments of the same shapes is not
    run again, in no launch.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Function, dict[Hashable, RegionRecord]] = WeakKeyDictionary()

    def run(self, scope: Scope, function: Function, run: Function, args: tuple[object, ...]) -> object:
        """Returns ``run(*args)``, the results of the region that is compiled as ``function``, or tensors like them."""
        records = self._known.setdefault(function, {})
        key = tuple(_region_key(leaf) for leaf in flatten(args))
        known = records.get(key)
        if known is not None:
            return self._repeat(scope, known, args)
        live, before, cuts = scope.live, scope.live.peak, scope.live.cuts
        base = live.peak = live.now
        out = run(*args)
        peak, live.peak = live.peak - base, max(before, live.peak)
        made = RegionRecord(scope.list_rows(), peak, out)
        if live.cuts == cuts and self._has_forms(made, live, args):
            records[key] = made
        return out

    def _has_forms(self, made: RegionRecord, live: LiveBytes, args: tuple[object, ...]) -> bool:
        """Puts forms in place of the record's tensors; returns False if one of them shares memory with others."""
        given = {id(leaf): i for i, leaf in enumerate(flatten(args))}
        others = 0

        def form(leaf: object) -> object:
            nonlocal others
            if not isinstance(leaf, DeviceTensor):
                return leaf
            if id(leaf) in given:
                return ArgumentIndex(given[id(leaf)])
            others += leaf.is_view or leaf.store.live is not live or leaf.store.born != live.cuts
            return ResultForm(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.store.bytes)

        made.out = rebuild(made.out, form)
        return not others

    def _repeat(self, scope: Scope, known: RegionRecord, args: tuple[object, ...]) -> object:
        """Adds the figures of a region that ran before; returns new results."""
        live, given = scope.live, flatten(args)
        live.peak = max(live.peak, live.now + known.peak)
        scope.collect_rows(known.rows)

        def make(leaf: object) -> object:
            if isinstance(leaf, ArgumentIndex):
                return given[leaf.index]
            if not isinstance(leaf, ResultForm):
                return leaf
            held = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device="meta")
            return DeviceTensor(held, Store(scope.device.allocator, leaf.bytes, live), scope.device, is_view=False)

        return rebuild(known.out, make)


def _region_key(leaf: object) -> Hashable:
    """Returns the key of an argument; of an object its type, since a region has one kind of part."""
    if isinstance(leaf, Tensor):
        return leaf_key(leaf)
    if isinstance(leaf, int | float | str) or leaf is None:
        return leaf
    return type(leaf).__qualname__


class Scope(TorchDispatchMode):
    """One launch: the recipe being collected, the memory it takes, and the recording if it is captured.

    Args:
        recording: the recording of a capture; None: an ordinary run.
        on_meta: True: run on tensors without values (captures, and everything in compile-only mode).
    """

    def __init__(self, device: LaunchHost, recording: CaptureRecording | None, on_meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.recording, self.on_meta = device, recording, on_meta
        self.live = LiveBytes()
        self.collective = 0
        """Bytes of results of collectives: a graph keeps them even where it keeps no other tensor."""
        self.ops = 0
        self.products = 0
        """Multiplications of matrix products."""
        self.moved = 0
        """Bytes that operations read and write."""
        self.compiled = 0
        self.silent = False
        """True inside a compiled graph, whose recipes are counted when it is compiled."""
        self.region = False
        """True inside a region that would be a compiled graph, on a card without values."""
        self.layer_reuse = LayerReuse()
        self._recipe: list[Hashable] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns True: torch before 2.10 compiles nothing while a user's dispatch mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.dispatch(func, args, kwargs or {})

    def add(self, name: str, args: Any, kwargs: Any) -> None:
        """Adds an operation to the recipe: its name, the shapes of its tensors, the values of everything else.

        In compile mode an operation outside a compiled graph is a recipe of its own.
        """
        if self.silent:
            self.ops += 1
            return
        self.collect((name, *(leaf_key(leaf) for leaf in flatten((args, kwargs)))))
        if not self.device.lazy and self.device.computes:
            self._end()

    def collect(self, row: Hashable) -> None:
        """Adds an operation's row to the recipe; raises if the recipe has too many operations."""
        self.layer_reuse.note(row)
        self._recipe.append(row)
        self.ops += 1
        limit = self.device.profile.max_ops
        if len(self._recipe) > limit:
            raise emulated_errors.too_many_ops(len(self._recipe), limit)

    def collect_rows(self, rows: Sequence[Hashable]) -> None:
        """Adds the rows of a part that ran before to the recipe."""
        for row in rows:
            self.layer_reuse.note(row)
        self._recipe.extend(rows)
        self.ops += len(rows)

    def list_rows(self) -> tuple[Hashable, ...]:
        """Returns the rows of the recipe so far."""
        return tuple(self._recipe)

    def measure(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Adds the work of one operation on tensors of the device."""
        made = sum(t.numel() * t.element_size() for t in outputs)
        self.moved += made + sum(t.numel() * t.element_size() for t in inputs)
        if inputs and any(part in name for part in PRODUCTS):
            left = inputs[1 if any(part in name for part in ADDING) else 0]
            self.products += sum(t.numel() for t in outputs) * left.shape[-1]

    @property
    def work(self) -> LaunchCounts:
        """The work of the launch so far."""
        return LaunchCounts(self.ops, self.products, self.moved)

    def cut(self) -> None:
        """Ends the recipe at a ``mark_step``: tensors that are alive now pass from one recipe to the next."""
        self.layer_reuse.cut(self.live.fresh)
        self.live.cut()
        self._end()

    def _end(self) -> None:
        """Ends a recipe, which is compiled if it is new."""
        if self._recipe:
            self.compiled += self.device.clock.run_recipe(tuple(self._recipe), len(self._recipe))
            self._recipe = []

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        self.device.scope = None
        if exc_type is None:
            self._end()
            if self.recording is None and not self.on_meta:
                self.device.clock.launched += self.device.clock.rates.seconds(self.work)
            self.device.allocator.grow_workspace(self.live.peak)
            if self.live.held > self.device.allocator.free:
                self.device.clock.count_event("memory_wait", f"{self.live.held} bytes of recipes in flight")
