"""Layers of decode launches of few rows: recorded once, then replayed by one call of the kernels' library.

A layer of such a launch is a dozen calls of the library and as many views of tensors. Python takes 0.1 ms for them: of
a token of 0.5 G parameters a tenth in bfloat16 and a fifth in 4 bits, on two cores of Zen 5. The second launch of a
number of rows records the calls and their arguments; later ones copy their inputs to the recorded tensors, and the
library makes all calls. They are the same calls, so that no bit changes.

Only layers whose work the library does are recorded. If torch computes anything in one, launches run call by call:
in float32, whose norms are torch's, with an 8-bit KV cache, experts or norms of queries and keys, and with several
ranks, whose sums Python exchanges. A recording holds the tensors of one layer: 40 KB a row at a width of 896.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.backends.cpu.attention_plan import CpuAttn, PlanKey, get_plan
from trencadis.backends.cpu.native import bounds_checks, kernel_threads
from trencadis.backends.cpu.native.attention_and_row_kernels import SingleTokenRows
from trencadis.backends.cpu.native.ctypes_structs import AttendLayout, AttendRowsLayout, ReplayedCall, RotaryLayout
from trencadis.backends.cpu.native.kernel_threads import Calls
from trencadis.core.device.backend import Attn, LayerKV, Rotary

MOST_ROWS = 16
"""Rows of the largest launch that is recorded: products take longer than Python beyond."""

LINEAR, ROWS, ROTARY, ATTEND, DENSE = range(5)
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
            gated_norm=other(self._real.gated_norm), flash=other(self._real.flash),
            convolve=other(self._real.convolve), delta_rule=other(self._real.delta_rule),
            delta_net=other(self._real.delta_net), adapters=other(self._real.adapters), pack=other(self._real.pack),
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

    def _dense(self, *args: Argument) -> int:
        *first, scale, kernels, _ = args
        self._keep(DENSE, (*first, kernels), scale)
        return self._real.dense(*args)

    def _copy(self, kind: type[S], at: int) -> S:
        """Returns a copy of the structure at an address, which lives as long as the calls."""
        own = kind.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(kind)))
        self.structures.append(own)
        return own

    def _rotate(self, at: int, *args: int) -> None:
        own = self._copy(RotaryLayout, at)
        self._keep(ROTARY, (ctypes.addressof(own), *args[:-1]))
        self._real.rotate(at, *args)

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
    """The attention of a layer, bound to its KV cache."""

    kv: LayerKV


class Layer(Protocol):
    """A layer of a decoder, or several that are called as one."""

    recurrent: bool
    local: bool
    causal: bool
    attention: CachedAttention

    def __call__(self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn) -> LayerOutputs: ...


class LaunchInputs(NamedTuple):
    """Tensors that all layers of a launch read: the stream, its rotary factors and the slots of its keys."""

    x: Tensor
    residual: Tensor | None
    cos: Tensor
    sin: Tensor
    slot: Tensor


def inputs_of(x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn) -> LaunchInputs:
    """Returns the inputs of a launch."""
    return LaunchInputs(x, residual, rotary.cos, rotary.sin, attn.slot_map)


class RecordedLaunch:
    """The calls of a launch's layers.

    Args:
        inputs: tensors that the calls read, and for the stream also write.
        recorder: the calls.
        plans: which rows each number in the calls stands for.
        out: what the layers return.
        memory: of all tensors in between.
    """

    def __init__(
        self, inputs: LaunchInputs, recorder: CallRecorder, plans: Sequence[PlanKey], out: LayerOutputs,
        memory: ReusedMemory,
    ) -> None:  # fmt: skip
        self._inputs, self._plans, self._out = inputs, plans, out
        self._held = recorder.structures, memory
        self._calls = (ReplayedCall * len(recorder.calls))(*recorder.calls)
        self._rows = (AttendRowsLayout * max(len(plans), 1))()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in between, without inputs."""
        return self._held[1].nbytes

    def replay(self, inputs: LaunchInputs, attn: CpuAttn) -> LayerOutputs:
        """Makes the calls for the rows of a launch; the outputs hold until the next one.

        Raises:
            MemoryError: a call found no memory for its sums.
        """
        for own, now in zip(self._inputs, inputs, strict=True):
            if own is not None and now is not None:
                own.copy_(now)
        for place, key in enumerate(self._plans):
            rows = get_plan(attn, attn.block_size, *key).singles
            assert rows is not None
            self._rows[place] = _layout_of(rows)
        replay, team = kernel_threads.calls().replay, kernel_threads.launch_threads()
        if replay(ctypes.addressof(self._calls), len(self._calls), ctypes.addressof(self._rows), team):
            raise MemoryError("no memory for the sums of a recorded launch")
        return self._out


def _layout_of(rows: SingleTokenRows) -> AttendRowsLayout:
    return AttendRowsLayout(
        rows.blocks.data_ptr(), rows.token.ctypes.data, rows.row.ctypes.data, rows.first.ctypes.data,
        rows.length.ctypes.data, len(rows.token), rows.blocks.stride(0),
    )  # fmt: skip


def record(layers: Sequence[Layer], given: LaunchInputs, attn: CpuAttn) -> tuple[LayerOutputs, RecordedLaunch | None]:
    """Runs layers and records their calls. None: they do what cannot be made again."""
    own = LaunchInputs(*(None if one is None else one.clone() for one in given))  # type: ignore[arg-type]
    held = attn._replace(slot_map=own.slot)
    held.block_size, held.plans = attn.block_size, attn.plans
    memory = ReusedMemory()
    recorder, computing = CallRecorder(kernel_threads.calls()), ComputingOps(memory)
    kernel_threads.launches.recorder = recorder.functions()
    try:
        with computing:
            out = run_layers(layers, own.x, own.residual, Rotary(own.cos, own.sin), held)
    finally:
        kernel_threads.launches.recorder = None
    plans = _name_rows(recorder, held)
    if computing.found or not recorder.complete or plans is None:
        return out, None
    return out, RecordedLaunch(own, recorder, plans, out, memory)


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
    layers: Sequence[Layer], x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn
) -> LayerOutputs:  # fmt: skip
    """Runs layers one after another."""
    for layer in layers:
        x, residual = layer(x, residual, rotary, attn)
    return x, residual


class RecordedLayers:
    """Layers of a decoder that are called as one, with a recording for each number of rows; see ``GroupingOps``.

    Args:
        layers: those of ``can_record``.
    """

    recurrent = False

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self.local, self.causal, self.attention = layers[0].local, layers[0].causal, layers[0].attention
        self._known: dict[tuple[int, bool], RecordedLaunch | None] = {}
        """Recordings by the number of rows, and by whether there is a residual stream; None: not yet."""
        self._caches: tuple[object, ...] = ()
        """KV caches of the layers when they were recorded, whose addresses are in the calls."""
        self._plain = False
        self.replays = 0
        """Launches that were replayed."""

    def __call__(self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn) -> LayerOutputs:
        assert isinstance(attn, CpuAttn)
        if self._plain or rotary.query_scale is not None or bounds_checks.enabled():
            return run_layers(self._layers, x, residual, rotary, attn)
        self._forget_other_caches()
        inputs, key = inputs_of(x, residual, rotary, attn), (len(x), residual is None)
        if key not in self._known:
            self._known[key] = None
            return run_layers(self._layers, x, residual, rotary, attn)
        known = self._known[key]
        if known is None:
            out, self._known[key] = record(self._layers, inputs, attn)
            self._plain = self._known[key] is None
            return out
        self.replays += 1
        return known.replay(inputs, attn)

    def _forget_other_caches(self) -> None:
        """Drops all recordings if the layers were bound to other caches meanwhile."""
        caches = tuple(layer.attention.kv for layer in self._layers)
        if len(caches) != len(self._caches) or any(a is not b for a, b in zip(caches, self._caches, strict=True)):
            self._caches = caches
            self._known.clear()


def can_record(layers: Sequence[Layer]) -> bool:
    """Returns True for layers that read the same rotary factors and attention inputs, and keep no recurrent state."""
    first = layers[0]
    return all(not x.recurrent and (x.local, x.causal) == (first.local, first.causal) for x in layers)


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

    def group_layers(self, layers: Sequence[Layer], attn: Attn) -> Sequence[Layer]:
        """Returns what runs in place of ``layers``: these, or ``RecordedLayers`` in a launch of few rows."""
        if not self.records or not decodes_few(attn):
            return layers
        known = self.recorded.get(id(layers))
        if known is None:
            made: Sequence[Layer] = [RecordedLayers(layers)] if can_record(layers) else layers
            known = self.recorded[id(layers)] = (layers, made)
        return known[1]
