"""Copies between the host and a program's static tensors: pinned memory on the host, at most two uploads a launch.

A launch's arrays are at most two pieces of memory: words of 32 bits, and bytes. The plug-in cannot be relied upon to
view a tensor as another dtype: it keeps 32 bits of an int64, so that eight bytes viewed as one would be another number.
Each piece has one type therefore. Words are int32, or float32 in stages that have real numbers: whole numbers below
2^24 are exact there, and the body gets them in the type that it expects. Nothing needs alignment, because a piece's
elements are all of one size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.hpu.habana_bridge import Bridge
from trencadis.backends.hpu.launches.hpu_host_arrays import LaunchForm, arrays, leaves, rebuild
from trencadis.backends.hpu.shape_policy import OutputForm
from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import HeadTensorsOut, Inputs, OutOfDeviceMemory, TensorsOut, host_output


@contextmanager
def named_errors(bridge: Bridge) -> Iterator[None]:
    """Converts errors of the device that mean a lack of memory to OutOfDeviceMemory."""
    try:
        yield
    except RuntimeError as error:
        if bridge.out_of_memory(error) and not isinstance(error, OutOfDeviceMemory):
            raise OutOfDeviceMemory(" ".join(str(error).split())) from error
        raise


Array = NDArray[Any]

EXACT = {"int32": 2**31, "float32": 2**24}
"""Integers below this are exact in a word of the dtype."""


@dataclass(frozen=True)
class PackedSlice:
    """The position of an array: elements [start, start + size) of a piece."""

    piece: int
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Packing:
    """The layout of a stage's arrays: ``types`` and ``sizes`` (elements) of the pieces, and each array's slice."""

    types: tuple[np.dtype[Any], ...]
    sizes: tuple[int, ...]
    slices: tuple[PackedSlice, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(t.itemsize * n for t, n in zip(self.types, self.sizes, strict=True))

    def write(self, piece: int, arrays: list[Array], target: Array) -> None:
        """Writes the arrays of one piece, [size] of its type, each in its slice.

        Raises:
            OverflowError: the piece's dtype does not hold an integer exactly.
        """
        most = EXACT.get(self.types[piece].name)
        for slice_, array in zip(self.slices, arrays, strict=True):
            if slice_.piece != piece:
                continue
            if most is not None and array.dtype.kind == "i" and array.dtype != target.dtype:
                _check(array, most)
            target[slice_.start : slice_.start + slice_.size] = array.reshape(-1)

    def views(self, pieces: list[Tensor]) -> list[Tensor]:
        """Returns each array as a view of its piece on the device."""
        return [
            pieces[slice_.piece][slice_.start : slice_.start + slice_.size].view(slice_.shape) for slice_ in self.slices
        ]


def make_packing(arrays: list[Array]) -> Packing:
    """Lays out arrays of these shapes and dtypes, words before bytes; a stage without bytes has one piece."""
    real = any(a.dtype.kind == "f" for a in arrays)
    types = (np.dtype(np.float32 if real else np.int32), np.dtype(np.uint8))
    sizes = [0, 0]
    slices = []
    for array in arrays:
        piece = int(array.dtype == np.uint8)
        slices.append(PackedSlice(piece, sizes[piece], array.shape))
        sizes[piece] += array.size
    count = 2 if sizes[1] else 1
    return Packing(types[:count], tuple(sizes[:count]), tuple(slices))


def types_of(arrays: list[Array]) -> list[torch.dtype]:
    """Returns the torch dtype of each array."""
    return [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]


def cast_inputs(types: Sequence[torch.dtype], body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps ``body`` so that inputs in the dtypes of a packing are converted to ``types``, one per leaf."""

    def run(inputs: Any) -> Any:
        each = iter(types)
        return body(rebuild(inputs, lambda t: t.to(next(each))))

    return run


def _check(array: Array, most: int) -> None:
    if array.size and max(int(array.max()), -int(array.min())) >= most:
        raise OverflowError(
            f"a launch's inputs hold {int(array.max())}; a card's words hold whole numbers below {most}"
        )


AREAS = 4
"""Staging areas of each kind: the host writes one while copies of the others, of this Step or the one before, run."""


class StagingArea:
    """Pinned host memory that uploads read. It grows to the largest upload, and is reused once its last upload has
    run.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._memory: Tensor | None = None
        self._event: Any = None

    def write(self, count: int) -> Tensor:
        """Returns at least ``count`` bytes (uint8) that may be written; waits for the last upload from this area."""
        if self._event is not None:
            self._event.synchronize()
        if self._memory is None or self._memory.numel() < count:
            self._memory = self._bridge.pin(torch.empty(1 << (count - 1).bit_length(), dtype=torch.uint8))
        return self._memory[:count]

    def mark_sent(self) -> None:
        """Records that the copy of the written bytes is queued."""
        self._event = self._event or self._bridge.event()
        self._event.record()


class Staging:
    """The staging areas of a device, shared by its programs: each kind of piece alternates between its own areas."""

    def __init__(self, bridge: Bridge) -> None:
        self._areas = [[StagingArea(bridge) for _ in range(AREAS)] for _ in range(2)]
        self._current = [0, 0]
        self.pinned = bridge.pinned
        """False: the areas are ordinary memory, and copies from them must block."""

    def next(self, piece: int) -> StagingArea:
        """Returns the next staging area for a kind of piece."""
        self._current[piece] = (self._current[piece] + 1) % AREAS
        return self._areas[piece][self._current[piece]]


class HeldOutput(HeadTensorsOut):
    """Outputs of a launch in one of the two sets of its program (``OutputSets``)."""

    fetching: HpuPending | None = None
    """Their copy to the host. The next launch that writes this set waits for its end."""


class OutputSets:
    """Two sets of tensors for the outputs of a program, in turn: a launch writes one while the other is fetched.

    A graph writes the same tensors in every replay, so which set it writes is an input of the launch. It writes both:
    one the new values, the other those that it has. So outputs need no copy on the card between two launches, and none
    is overwritten before it is fetched.

    Args:
        forms: the outputs of a launch of ``rows`` rows.
    """

    def __init__(self, forms: Sequence[OutputForm], rows: int, device: torch.device) -> None:
        self.sets = [self._make(forms, rows, device) for _ in range(2)]
        self.turn = 0
        """The set that the next launch writes."""
        self.bytes = 2 * rows * sum(form.bytes for form in forms)

    def _make(self, forms: Sequence[OutputForm], rows: int, device: torch.device) -> HeldOutput:
        token, *others = (
            torch.zeros(form.shape(rows), dtype=getattr(torch, form.dtype), device=device) for form in forms
        )
        logprob, rank, top_id, top_logprob = others or (None,) * 4
        return HeldOutput(token, logprob, rank, top_id, top_logprob)

    def bind(self, body: Callable[[Any], HeadTensorsOut]) -> Callable[[object, Tensor], None]:
        """Returns ``body`` with a second argument, the number of the set [1] that it stores its outputs in."""

        def run(inputs: object, turn: Tensor) -> None:
            made = body(inputs)
            first = turn == 0  # after the body, so that no cut of its graph keeps it
            for new, *held in zip(made, *self.sets, strict=True):
                if new is None:
                    assert held == [None, None]
                    continue
                one, two = held
                assert (new.shape, new.dtype) == (one.shape, one.dtype), (new.shape, new.dtype, one.shape, one.dtype)
                one.copy_(torch.where(first, new, one))
                two.copy_(torch.where(first, two, new))

        return run

    def wait(self) -> HeldOutput:
        """Returns the set that the next launch writes, once the fetch of what it holds has ended."""
        found = self.sets[self.turn]
        fetching, found.fetching = found.fetching, None
        if fetching is not None:
            fetching.wait()
        return found


class StaticInputs:
    """A bucket's inputs at fixed addresses on the card: views of one or two pieces (``make_packing``).

    A graph reads the views and never writes to them. A check may write to one from outside: that changes its piece.

    Args:
        outputs: where the launches store their outputs; None: they return new tensors, or the graph's own.
    """

    def __init__(self, bucket: Bucket, bridge: Bridge, form: LaunchForm, outputs: OutputSets | None = None) -> None:
        self.bucket, self.form = bucket, form
        self.staging = Staging(bridge)
        """Replaced by the backend with the one that its programs share."""
        self.outputs = outputs
        blank = arrays(bucket, None, form)
        self.types = types_of(leaves(blank))
        """The dtype in which the body expects each array, whatever the dtype of its piece."""
        self._sent: list[Array] = self.list_arrays(None)
        self.packing = make_packing(self._sent)
        self.pieces = [self._blank(piece).to(bridge.device) for piece in range(len(self.packing.types))]
        views = iter(self.packing.views(self.pieces))
        self.tensors: Any = rebuild(blank, lambda array: next(views))
        self.turn: Tensor | None = next(views, None)
        """[1]: which set of ``outputs`` a launch writes."""
        self.bytes = self.packing.bytes + (outputs.bytes if outputs is not None else 0)

    def list_arrays(self, inputs: Inputs | None) -> list[Array]:
        """Returns the host arrays of a launch in the order of the packing."""
        found: list[Array] = leaves(arrays(self.bucket, inputs, self.form))
        return found if self.outputs is None else [*found, np.array([self.outputs.turn], np.int32)]

    def _blank(self, piece: int) -> Tensor:
        made = np.empty(self.packing.sizes[piece], self.packing.types[piece])
        self.packing.write(piece, self._sent, made)
        return torch.from_numpy(made)

    def fill(self, inputs: Inputs | None) -> None:
        """Queues the copies of the pieces that differ from those sent last: at most two."""
        if self.outputs is not None:
            self.outputs.turn ^= 1
        filled = self.list_arrays(inputs)
        changed = {
            slice_.piece
            for slice_, last, new in zip(self.packing.slices, self._sent, filled, strict=True)
            if not np.array_equal(last, new)
        }
        for piece in sorted(changed):
            self._send(piece, filled)
        self._sent = filled

    def _send(self, piece: int, filled: list[Array]) -> None:
        kind, size = self.packing.types[piece], self.packing.sizes[piece]
        area = self.staging.next(piece)
        source = area.write(size * kind.itemsize).view(self.pieces[piece].dtype)
        self.packing.write(piece, filled, source.numpy())
        self.pieces[piece].copy_(source, non_blocking=self.staging.pinned)
        area.mark_sent()


class HostOutputPool:
    """Memory for outputs on their way to the host, by shape and dtype; each piece belongs to one result until that is
    read.

    A replay of a graph overwrites the outputs of the one before, and waits for no fetch that reads them. So where there
    are graphs, outputs that have no ``OutputSets`` are first copied on the card, behind their launch and before the
    next.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge, self.pinned, self._copies = bridge, bridge.pinned, bridge.is_lazy()
        self._host: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Returns pinned memory with the shape and dtype of ``like``."""
        free = self._host.setdefault((like.shape, like.dtype), [])
        return free.pop() if free else self._bridge.pin(torch.empty(like.shape, dtype=like.dtype))

    def keep(self, outputs: list[Tensor]) -> list[Tensor]:
        """Returns tensors on the card that hold ``outputs`` until they are fetched: copies where there are graphs."""
        if not self._copies:
            return outputs
        kept = []
        for t in outputs:
            # The card's allocator gets them back: a step may have many launches, whose copies no plan counts.
            kept.append(torch.zeros(t.shape, dtype=t.dtype, device=self._bridge.device))
            kept[-1].copy_(t, non_blocking=True)
        self._bridge.mark_step()
        return kept

    def prepare(self, out: TensorsOut | None) -> None:
        """Copies tensors like the outputs once on the card, so that no later copy of their shapes compiles anything."""
        if self._copies and isinstance(out, tuple) and not isinstance(out, HeldOutput):
            device = self._bridge.device
            self.keep([torch.zeros(t.shape, dtype=t.dtype, device=device) for t in out if isinstance(t, Tensor)])

    def release(self, host: list[Tensor]) -> None:
        """Returns memory to the pool; safe on any thread."""
        for memory in host:
            self._host[memory.shape, memory.dtype].append(memory)

    def event(self) -> Any:
        """Returns a new event."""
        return self._bridge.event()

    def named_errors(self) -> AbstractContextManager[None]:
        """Converts late errors that mean a lack of memory."""
        return named_errors(self._bridge)


POLL = 5e-5
"""Seconds between two questions whether results have arrived."""


class HpuPending:
    """Outputs on their way to the host; ``core.device.backend.Pending``. Any thread may wait for them.

    Copies into pinned memory are only queued, and an event behind them signals when they have arrived. Where pinned
    memory is refused no event signals the end of the host's part of a copy, so each copy blocks.
    """

    def __init__(self, out: TensorsOut, rows: int, landing: HostOutputPool) -> None:
        given = [t for t in out if t is not None]
        self._out, self._rows, self._landing = out, rows, landing
        self._kept = given if isinstance(out, HeldOutput) else landing.keep(given)
        self._host = [landing.take(t) for t in given]
        for target, source in zip(self._host, self._kept, strict=True):
            target.copy_(source, non_blocking=landing.pinned)
        self._event: Any = landing.event() if landing.pinned else None
        if self._event is not None:
            self._event.record()
        self._found: Any = None
        self._arrived = self._event is None
        self._error: RuntimeError | None = None
        if isinstance(out, HeldOutput):
            out.fetching = self

    def done(self) -> bool:
        """Returns True if ``result`` would not wait."""
        return self._arrived or bool(self._event.query())

    def result(self) -> Any:
        """Waits for the copies and returns the outputs on the host."""
        if self._found is None:
            self._found = self._read()
        return self._found

    def wait(self) -> None:
        """Waits until the copies have arrived, or a launch has failed: ``result`` raises its error."""
        if self._arrived:
            return
        try:
            with self._landing.named_errors():
                # The plug-in holds its lock of events while it waits for one: another thread could record none.
                while not self._event.query():
                    time.sleep(POLL)
                self._event.synchronize()
        except RuntimeError as error:
            self._error = error
        self._arrived = True

    def _read(self) -> Any:
        self.wait()
        if self._error is not None:
            raise self._error
        found = iter([t[: self._rows].numpy().copy() for t in self._host])
        read = host_output(self._out, [None if t is None else next(found) for t in self._out])
        self._landing.release(self._host)
        self._host, self._kept = [], []
        return read
