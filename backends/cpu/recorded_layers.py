"""Layers of decode launches of few rows: recorded once, then replayed by one call of the kernels' library.

A layer of such a launch is a dozen calls of the library and as many views of tensors. Python takes 0.1 ms for them: of
a token of 0.5 G parameters a tenth in bfloat16 and a fifth in 4 bits, on two cores of Zen 5. The second launch of a
number of rows records the calls and their arguments; later ones copy their inputs to the recorded tensors, and the
library makes all calls. They are the same calls, so that no bit changes. Launches with adapters have recordings of
their own: the runs of rows with one adapter each are an input, and A and B are read where the slots are.

Neighbours of one kind are recorded together: those with attention over the same tokens, or with a recurrent state.
Only layers whose work the library does are recorded. If torch computes anything in one, it runs call by call: in
float16, whose products are torch's, with an 8-bit KV cache, with experts that ``expert_kernels`` does not take, and
with several ranks, whose sums Python exchanges. A recording holds the tensors of one layer: 40 KB a row at a width of
896.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import groupby, starmap
from operator import is_not
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.backends.cpu.attention_plan import CpuAttn, PlanKey, get_plan
from trencadis.backends.cpu.lora_adapter_products import CpuAdapterRows
from trencadis.backends.cpu.native import bounds_checks, kernel_threads
from trencadis.backends.cpu.native.attention_and_row_kernels import SingleTokenRows
from trencadis.backends.cpu.native.ctypes_structs import (
    AttendLayout,
    AttendRowsLayout,
    DeltaNetLayout,
    ReplayedCall,
    ReplayedLaunchLayout,
    RotaryLayout,
)
from trencadis.backends.cpu.native.kernel_threads import Calls
from trencadis.core.device.backend import AdapterRows, Attn, LayerKV, Rotary
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.model_and_ops_api import RecurrentState

MOST_ROWS = 16
"""Rows of the largest launch that is recorded: products take longer than Python beyond."""

LINEAR, ROWS, ROTARY, ATTEND, DENSE, ADAPTERS, HEADS, DELTA_NET, GATE, EXPERTS = range(10)
"""Numbers of the functions in replay.h."""

aten = torch.ops.aten
ALLOCATIONS = frozenset({
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
})  # fmt: skip
"""Operations that compute nothing and return new memory."""

T = TypeVar("T")
S = TypeVar("S", bound=ctypes.Structure)
Argument = int | float | None
Place = Rotary | RecurrentRows
"""Rotary factors, or the rows of a launch for a recurrent layer."""
LayerOutputs = tuple[Tensor, Tensor | None]
"""Output and residual stream of a layer, [n, hidden] each."""


class CallRecorder:
    """Functions that make the library's calls, and keep those that can be made again.

    Args:
        real: the library's functions.
    """

    def __init__(self, real: Calls) -> None:
        self._real = real
        self.calls: list[ReplayedCall] = []
        self.structures: list[ctypes.Structure] = []
        """Structures that the calls read."""
        self.attends: list[tuple[ReplayedCall, AttendLayout]] = []
        self.complete = True
        """False: a call was made that is not kept."""

    def functions(self) -> Calls:
        """Returns the functions that take the place of the library's."""
        other = self._other
        return self._real._replace(
            linear=self._linear, rows=self._rows, rotate=self._rotate, attend=self._attend, dense=self._dense,
            adapters=self._adapters, head_norms=self._head_norms, gate_heads=self._gate_heads,
            gated_norm=other(self._real.gated_norm),
            flash=other(self._real.flash),
            convolve=other(self._real.convolve), delta_rule=other(self._real.delta_rule),
            delta_net=self._delta_net, pack=other(self._real.pack),
            experts=self._experts,
        )  # fmt: skip

    def _other(self, call: Callable[..., T]) -> Callable[..., T]:
        """Returns ``call`` as one that is made, but not kept."""

        def make(*args: object) -> T:
            self.complete = False
            return call(*args)

        return make

    def _keep(self, function: int, arguments: Iterable[Argument], real: Argument = 0.0) -> ReplayedCall:
        made = ReplayedCall(function=function, real=real)
        for place, one in enumerate(arguments):
            made.arguments[place] = int(one or 0)
        self.calls.append(made)
        return made

    def _linear(self, *args: Argument) -> int:
        self._keep(LINEAR, args[:-1])
        return self._real.linear(*args)

    def _rows(self, *args: Argument) -> None:
        *first, eps, kind, kernels, _ = args
        self._keep(ROWS, (*first, kind, kernels), eps)
        self._real.rows(*args)

    def _head_norms(self, *args: Argument) -> None:
        *first, eps, kind, kernels, _ = args
        self._keep(HEADS, (*first, kind, kernels), eps)
        self._real.head_norms(*args)

    def _gate_heads(self, *args: Argument) -> None:
        self._keep(GATE, args[:-1])
        self._real.gate_heads(*args)

    def _dense(self, *args: Argument) -> int:
        *first, scale, kernels, _ = args
        self._keep(DENSE, (*first, kernels), scale)
        return self._real.dense(*args)

    def _adapters(self, *args: Argument) -> int:
        self._keep(ADAPTERS, args[:-1])
        return self._real.adapters(*args)

    def _experts(self, *args: int) -> int:
        self._keep(EXPERTS, args[:-1])
        return self._real.experts(*args)

    def _copy(self, kind: type[S], at: int) -> S:
        """Returns a copy of the structure at an address, which lives as long as the calls."""
        own = kind.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(kind)))
        self.structures.append(own)
        return own

    def _rotate(self, at: int, *args: int) -> None:
        own = self._copy(RotaryLayout, at)
        self._keep(ROTARY, (ctypes.addressof(own), *args[:-1]))
        self._real.rotate(at, *args)

    def _delta_net(self, at: int, *args: int) -> int:
        own = self._copy(DeltaNetLayout, at)
        self._keep(DELTA_NET, (ctypes.addressof(own), *args[:-1]))
        return self._real.delta_net(at, *args)

    def _attend(self, at: int, *args: int) -> int:
        own = self._copy(AttendLayout, at)
        self.attends.append((self._keep(ATTEND, (ctypes.addressof(own), *args[:-1])), own))
        return self._real.attend(at, *args)


class ReusedMemory:
    """Allocates the tensors of a recording and keeps their memory; memory that is no longer used is used again."""

    def __init__(self) -> None:
        self.held: list[tuple[Tensor, int]] = []
        """Tensors, each with the use count that its storage has while only this list refers to it."""

    def give(self, made: Tensor) -> Tensor:
        """Returns ``made``, or a tensor like it in memory that is free again."""
        size = made.untyped_storage().nbytes()
        for own, alone in self.held:
            if own.nbytes == size and own.dtype == made.dtype and _holders(own) == alone:
                return own.as_strided(made.shape, made.stride())
        own = torch.empty(size // made.itemsize, dtype=made.dtype)
        self.held.append((own, _holders(own)))
        return own.as_strided(made.shape, made.stride())

    @property
    def nbytes(self) -> int:
        """Bytes of all memory."""
        return sum(one.nbytes for one, _ in self.held)


def _holders(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class ComputingOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds out whether torch computes anything, and takes new tensors from ``memory``."""

    def __init__(self, memory: ReusedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: else torch imports its compiler at the first recording, while a request waits for a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            return self._memory.give(out)
        if func._schema.is_mutable or not _are_views(out, args):
            self.found = True
        return out


def _are_views(out: object, args: Sequence[object]) -> bool:
    """Returns True if ``out`` is a tensor, or tensors, in the memory of those among ``args``."""
    outs = out if isinstance(out, list | tuple) else [out]
    memory = {one.untyped_storage().data_ptr() for one in args if _has_storage(one)}
    return all(_has_storage(one) and one.untyped_storage().data_ptr() in memory for one in outs)


def _has_storage(value: object) -> TypeGuard[Tensor]:
    """Returns True for a tensor whose memory torch knows; weights that oneDNN packed have none."""
    return isinstance(value, Tensor) and value.layout is torch.strided


class CachedAttention(Protocol):
    """The attention of a layer, bound to its KV cache, or the recurrent layer in its place, bound to its states."""

    kv: LayerKV
    state: RecurrentState


class Layer(Protocol):
    """A layer of a decoder, or several that are called as one."""

    recurrent: bool
    local: bool
    causal: bool
    attention: CachedAttention | None

    def __call__(
        self, x: Tensor, residual: Tensor | None, place: Place, attn: Attn, *rows: AdapterRows
    ) -> LayerOutputs: ...


class LaunchInputs(NamedTuple):
    """Tensors that all layers of a launch read: the stream, and where its tokens stand."""

    x: Tensor
    residual: Tensor | None
    shared: tuple[Tensor, ...]
    """Rotary factors and the slots of keys, or the fields of ``RecurrentRows``."""

    def copy(self) -> LaunchInputs:
        """Returns copies of all tensors."""
        residual = None if self.residual is None else self.residual.clone()
        return LaunchInputs(self.x.clone(), residual, tuple(one.clone() for one in self.shared))

    def fill(self, given: LaunchInputs) -> None:
        """Copies the values of another launch into these tensors."""
        self.x.copy_(given.x)
        if self.residual is not None and given.residual is not None:
            self.residual.copy_(given.residual)
        for own, now in zip(self.shared, given.shared, strict=True):
            own.copy_(now)


def inputs_of(x: Tensor, residual: Tensor | None, place: Place, attn: Attn) -> LaunchInputs:
    """Returns the inputs of a launch."""
    shared = tuple(place) if isinstance(place, RecurrentRows) else (place.cos, place.sin, attn.slot_map)
    return LaunchInputs(x, residual, shared)


class RecordedLaunch:
    """The calls of a launch's layers.

    Args:
        inputs: tensors that the calls read, and for the stream also write.
        recorder: the calls.
        plans: which rows each number in the calls stands for.
        out: what the layers return.
        memory: of all tensors in between.
        attn: attention inputs whose other tensors are the same in all launches of so many rows.
    """

    def __init__(
        self, inputs: LaunchInputs, recorder: CallRecorder, plans: Sequence[PlanKey], out: LayerOutputs,
        memory: ReusedMemory, attn: CpuAttn,
    ) -> None:  # fmt: skip
        self._inputs, self._plans, self._out = inputs, plans, out
        self._held = recorder.structures, memory, attn.row_start
        self._calls = (ReplayedCall * len(recorder.calls))(*recorder.calls)
        self._rows = (AttendRowsLayout * max(len(plans), 1))()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in between, without inputs."""
        return self._held[1].nbytes

    def replay(self, inputs: LaunchInputs, attn: CpuAttn, adapters: Sequence[CpuAdapterRows]) -> LayerOutputs:
        """Makes the calls for the rows of a launch and their adapters; the outputs hold until the next one.

        Raises:
            MemoryError: a call found no memory for its sums.
        """
        self._inputs.fill(inputs)
        for place, key in enumerate(self._plans):
            rows = get_plan(attn, attn.block_size, *key).singles
            assert rows is not None
            self._rows[place] = _layout_of(rows)
        runs = adapters[0].pieces if adapters else None
        launch = ReplayedLaunchLayout(ctypes.addressof(self._rows), *((None, 0) if runs is None else _at(runs)))
        replay, team = kernel_threads.calls().replay, kernel_threads.launch_threads()
        if replay(ctypes.addressof(self._calls), len(self._calls), ctypes.addressof(launch), team):
            raise MemoryError("no memory for the sums of a recorded launch")
        return self._out


def _at(runs: Tensor) -> tuple[int, int]:
    return runs.data_ptr(), len(runs)


def _layout_of(rows: SingleTokenRows) -> AttendRowsLayout:
    return AttendRowsLayout(
        rows.blocks.data_ptr(), rows.token.ctypes.data, rows.row.ctypes.data, rows.first.ctypes.data,
        rows.length.ctypes.data, len(rows.token), rows.blocks.stride(0),
    )  # fmt: skip


def record(
    layers: Sequence[Layer], given: LaunchInputs, attn: CpuAttn, adapters: Sequence[CpuAdapterRows] = ()
) -> tuple[LayerOutputs, RecordedLaunch | None]:
    """Runs layers and records their calls. None: they do what cannot be made again."""
    own = given.copy()
    held, place = _take_inputs(own, attn, layers[0].recurrent)
    memory = ReusedMemory()
    recorder, computing = CallRecorder(kernel_threads.calls()), ComputingOps(memory)
    kernel_threads.launches.recorder = recorder.functions()
    try:
        with computing:
            out = run_layers(layers, own.x, own.residual, place, held, *adapters)
    finally:
        kernel_threads.launches.recorder = None
    plans = _name_rows(recorder, held)
    if computing.found or not recorder.complete or plans is None:
        return out, None
    return out, RecordedLaunch(own, recorder, plans, out, memory, held)


def _take_inputs(own: LaunchInputs, attn: CpuAttn, recurrent: bool) -> tuple[CpuAttn, Place]:
    """Returns the attention inputs and places of layers that read the tensors of a recording."""
    held = attn._replace(row_start=attn.row_start.clone())
    if not recurrent:
        held = held._replace(slot_map=own.shared[2])
    held.block_size, held.plans = attn.block_size, attn.plans
    return held, RecurrentRows(*own.shared) if recurrent else Rotary(*own.shared[:2])


def _name_rows(recorder: CallRecorder, attn: CpuAttn) -> Sequence[PlanKey] | None:
    """Numbers the rows that calls of attention read; returns the plans that they are from, None if one is unknown."""
    known = {(p.singles.token.ctypes.data, p.singles.first.ctypes.data): key
             for key, p in attn.plans.items() if p.singles is not None}  # fmt: skip
    plans: list[PlanKey] = []
    for call, layout in recorder.attends:
        key = known.get((layout.token, layout.first))
        if key is None:
            return None
        if key not in plans:
            plans.append(key)
        call.rows = plans.index(key)
    return plans


def run_layers(
    layers: Sequence[Layer], x: Tensor, residual: Tensor | None, place: Place, attn: Attn, *adapters: AdapterRows
) -> LayerOutputs:
    """Runs layers one after another."""
    for layer in layers:
        x, residual = layer(x, residual, place, attn, *adapters)
    return x, residual


class RecordedLayers:
    """Layers of a decoder that are called as one; see ``GroupingOps``.

    There is a recording for each number of rows, with adapters and without.

    Args:
        layers: a part of ``split_by_kind``.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers, first = layers, layers[0]
        self.recurrent, self.local, self.causal = first.recurrent, first.local, first.causal
        self.attention = first.attention
        self._known: dict[tuple[int, bool, bool], RecordedLaunch | None] = {}
        """Recordings by the number of rows, and by whether there are a residual stream, and adapters; None: not yet."""
        self._bound = [
            (layer.attention, "state" if layer.recurrent else "kv") for layer in layers if layer.attention is not None
        ]
        """Each layer's attention or mixer, and the name of its attribute that holds the KV cache or the states."""
        self._caches: list[object] = []
        """KV caches or states of the layers when they were recorded, whose addresses are in the calls."""
        self._plain: set[bool] = set()
        """Launches that are never recorded: with adapters (True), or without."""
        self.replays = 0
        """Launches that were replayed."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, place: Place, attn: Attn, *rows: AdapterRows
    ) -> LayerOutputs:
        assert isinstance(attn, CpuAttn)
        adapted, scaled = bool(rows), isinstance(place, Rotary) and place.query_scale is not None
        if adapted in self._plain or scaled or bounds_checks.enabled():
            return run_layers(self._layers, x, residual, place, attn, *rows)
        self._forget_other_caches()
        inputs, key = inputs_of(x, residual, place, attn), (len(x), residual is None, adapted)
        if key not in self._known:
            self._known[key] = None
            return run_layers(self._layers, x, residual, place, attn, *rows)
        known, adapters = self._known[key], cast("tuple[CpuAdapterRows, ...]", rows)
        if known is None:
            out, self._known[key] = record(self._layers, inputs, attn, adapters)
            if self._known[key] is None:
                self._plain.add(adapted)
            return out
        self.replays += 1
        return known.replay(inputs, attn, adapters)

    def _forget_other_caches(self) -> None:
        """Drops all recordings if the layers were bound to other caches meanwhile."""
        caches = list(starmap(getattr, self._bound))
        if len(caches) != len(self._caches) or any(map(is_not, caches, self._caches)):
            self._caches = caches
            self._known.clear()


def split_by_kind(layers: Sequence[Layer]) -> list[Sequence[Layer]]:
    """Cuts layers where neighbours differ in what they read: states, or rotary factors and attention inputs."""
    kinds = groupby(layers, key=lambda layer: (layer.recurrent, layer.local, layer.causal))
    return [list(some) for _, some in kinds]


def decodes_few(attn: Attn) -> bool:
    """Returns True for a launch of up to ``MOST_ROWS`` rows of one token each, without padding."""
    rows = len(attn.context) - 1
    if not isinstance(attn, CpuAttn) or attn.upto is not None or not 0 < rows <= MOST_ROWS:
        return False
    return len(attn.slot_map) == rows and attn.row_start.tolist() == [*range(rows + 1), rows]


class ReplayOps:
    """The part of the CPU's ops that records layers; implements ``core.models.model_and_ops_api.GroupingOps``."""

    records = False
    """True: layers of small decode launches are recorded, and replayed in one call."""

    @cached_property
    def recorded(self) -> dict[int, tuple[Sequence[Layer], Sequence[Layer]]]:
        """Identity of layers -> these layers, and what runs in place of them."""
        return {}

    def group_layers(self, layers: Sequence[Layer], attn: Attn, adapted: bool) -> Sequence[Layer]:
        """Returns what runs in place of ``layers``: these, or ``RecordedLayers`` in a launch of few rows."""
        if not self.records or not decodes_few(attn):
            return layers
        known = self.recorded.get(id(layers))
        if known is None:
            made = [RecordedLayers(some) for some in split_by_kind(layers)]
            known = self.recorded[id(layers)] = (layers, made)
        return known[1]
