"""The backend for an NVIDIA card, and the program of a bucket: static inputs, a body, and its graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from trencadis.backends.cpu.gloo_comm import SingleRank
from trencadis.backends.cuda.cpu_offloaded_layers import HostLayerOps, HostLayers
from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.backends.cuda.launches.bucket_capacity import cross_attention_bytes, input_bytes
from trencadis.backends.cuda.launches.cuda_host_arrays import Sizes
from trencadis.backends.cuda.launches.input_buffers import InputBuffers, StageBuffers, buffer_bytes
from trencadis.backends.cuda.runtime_protocol import CudaEvent, Graph, Runtime, Stream
from trencadis.backends.cuda.shape_policy import policy
from trencadis.core.buckets import Bucket, Stage, target_bucket
from trencadis.core.device.backend import (
    BackendConfig,
    Body,
    Comm,
    Inputs,
    Memory,
    Ops,
    OutOfDeviceMemory,
    Pipe,
    Program,
    ProgramState,
    TensorsOut,
    host_output,
)
from trencadis.core.vision_config import SlotForm


class AttentionLibrary(Protocol):
    """A library that computes attention in place of this engine's kernels
    (``attention_libraries.ops_with_attention_library.AttentionLibraryAdapter``).
    """

    def wrap_body(self, buffers: InputBuffers, body: Body) -> Body:
        """Wraps ``body`` with the library's set-up; ``buffers`` call back for each launch that it must plan."""
        ...


FETCHED = (Stage.SAMPLE, Stage.POOL)
"""Stages whose outputs are copied to the host."""


class CudaProgram:
    """``core.device.backend.Program``.

    Buckets of a stage share the memory of their inputs, and graphs of a stage their working memory.

    Args:
        fetched: recorded when the last copy of outputs to the host is done; later launches may overwrite them.
        library: attention library in place of this engine's kernels.
    """

    def __init__(
        self, bucket: Bucket, body: Body, sizes: Sizes, runtime: Runtime, buffers: StageBuffers, fetched: CudaEvent,
        library: AttentionLibrary | None = None,
    ) -> None:  # fmt: skip
        self.bucket, self.body, self.runtime = bucket, body, runtime
        self.state = ProgramState.PLANNED
        try:
            form = target_bucket(bucket)
            self.buffers = InputBuffers(form, sizes, runtime, buffers.of(form.stage, buffer_bytes(form, sizes)))
            if library is not None:
                self.body = library.wrap_body(self.buffers, body)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error
        self.bytes = self.buffers.bytes
        self._fetched = fetched
        self._graph: Graph | None = None

    @property
    def inputs(self) -> Any:
        """The stage's input tensors, at fixed addresses."""
        return self.buffers.tensors

    def fill(self, inputs: Inputs | None) -> None:
        """Queues the copy of ``inputs``; None: padding only."""
        self.buffers.fill(inputs)

    def compile(self) -> None:
        """Launches padding, since Triton compiles a kernel at its first call; an interpreter compiles nothing."""
        if self.runtime.interprets:
            self.state = max(self.state, ProgramState.COMPILED)
        else:
            self.fill(None)
            self.run()

    def rehearse(self) -> None:
        """Launches padding, by the graph if there is one."""
        if not self.runtime.interprets:
            self.fill(None)
            self.replay()

    def run(self) -> Any:
        self._begin()
        out = self.runtime.launch(str(self.bucket), self.body, self.inputs, self.buffers.static)
        self._end()
        self.state = max(self.state, ProgramState.COMPILED)
        return out

    def capture(self) -> None:
        """Captures after a warm run, so that no library sets itself up within the capture."""
        if not self.runtime.graphs or self.state is ProgramState.CAPTURED:
            return
        self.fill(None)
        self.runtime.on_captures(self._capture)

    def _capture(self) -> None:
        self.run()
        before = self.runtime.memory.free()
        self._graph = self.runtime.capture(
            self.bucket.stage.name, str(self.bucket), self.body, self.inputs, self.buffers.static
        )
        self.bytes = self.buffers.bytes + max(before - self.runtime.memory.free(), 0)
        self.state = ProgramState.CAPTURED

    def replay(self) -> Any:
        """Replays the graph. Its outputs are the same tensors each time, valid until the next launch of this bucket's
        stage.
        """
        if self._graph is None:
            return self.run()
        self._begin()
        self.runtime.replay(self._graph)
        self._end()
        return self._graph.out

    def release(self) -> int:
        """Releases the graph and returns the bytes that were freed.

        These are the graph's nodes; with the last graph of its stage, also the memory that they shared.
        """
        if self._graph is None:
            return 0
        self.runtime.synchronize()
        before = self.runtime.memory.free()
        graph, self._graph = self._graph, None
        self.state, self.bytes = ProgramState.COMPILED, self.buffers.bytes
        self.runtime.release(graph)
        return max(self.runtime.memory.free() - before, 0)

    def _begin(self) -> None:
        """Orders the launch after the copy of its inputs, and after the copy of the outputs that it overwrites.

        Stages do not share the memory of outputs: only one whose outputs are fetched waits for their copy.
        """
        self.runtime.wait(Stream.PROGRAMS, self.buffers.buffer.written)
        if self.bucket.stage in FETCHED:
            self.runtime.wait(Stream.PROGRAMS, self._fetched)

    def _end(self) -> None:
        self.runtime.record(self.buffers.buffer.last_read, Stream.PROGRAMS)


class CudaPending:
    """Outputs being copied to the host; ``core.device.backend.Pending``.

    Args:
        fetched: recorded when the copies are done, for launches that overwrite what the copies read.
    """

    def __init__(self, out: TensorsOut, rows: int, runtime: Runtime, fetched: CudaEvent) -> None:
        self._rows, self._runtime, self._done = rows, runtime, runtime.event()
        launched = runtime.event()
        runtime.record(launched, Stream.PROGRAMS)
        runtime.wait(Stream.DOWNLOADS, launched)
        self._out, self._host = out, [None if t is None else self._copy(t) for t in out]
        runtime.record(self._done, Stream.DOWNLOADS)
        runtime.record(fetched, Stream.DOWNLOADS)

    def _copy(self, t: Tensor) -> Tensor:
        host = self._runtime.allocate_pinned((self._rows, *t.shape[1:]), t.dtype)
        self._runtime.download(host, t[: self._rows])
        return host

    def done(self) -> bool:
        """Returns True if ``result`` would not wait."""
        return self._runtime.is_complete(self._done)

    def result(self) -> Any:
        """Waits for the copies and returns the outputs on the host."""
        self._runtime.host_wait(self._done)
        return host_output(self._out, [None if t is None else self._runtime.read(t) for t in self._host])


TWIN = "{} (twin): no card computes here; launches, copies and graphs are imitated on the CPU, for tests only."
INTERPRETED = "{} (interpreted): kernels run in Triton's interpreter, for tests only."


@runtime_checkable
class BlockingOps(Protocol):
    """Ops whose attention takes queries in planned blocks (``ops.CudaOps``)."""

    query_group: int


class CudaBackend:
    """``core.device.backend.Backend`` over a runtime: a card's, or its twin on the CPU.

    Attributes:
        library: attention library in place of this engine's kernels, set before programs are made.
        reopen: makes a backend for another model on the same runtime.
    """

    values = True
    library: AttentionLibrary | None = None
    reopen: Callable[[BackendConfig], CudaBackend]

    def __init__(self, cfg: BackendConfig, runtime: Runtime, ops: Ops, comm: Comm | None = None) -> None:
        options = cfg.options or {}
        self.cfg, self.dtype = cfg, cfg.dtype
        self.name = in_use().name
        self.runtime, self.device, self.label = runtime, runtime.device, runtime.label
        self.ops = ops
        self.comm: Comm = comm or SingleRank()
        self.pipe: Pipe | None = None
        self.memory: Memory = runtime.memory
        self.hooks = runtime.hooks
        self.notes: tuple[str, ...] = getattr(comm, "notes", ())
        if runtime.device.type == "cpu":
            self.notes += ((INTERPRETED if runtime.interprets else TWIN).format(self.name),)
        forms = [-(-(heads or 4) // cfg.world) for heads, _ in cfg.head_forms]
        kv_heads = forms[0]
        groups = [max((cfg.heads or 8 * heads * cfg.world) // cfg.world // heads, 1) for heads in forms]
        self.sizes = Sizes(
            block_size=cfg.block_size, row_blocks=cfg.max_blocks_per_row, vocab=cfg.vocab_size,
            kv_heads=kv_heads, processors=runtime.processors, invariant=cfg.batch_invariant, upto=cfg.upto,
            recurrent=cfg.recurrent, group=max(groups),
        )  # fmt: skip
        if isinstance(ops, BlockingOps):
            ops.query_group = max(groups) if len(set(groups)) > 1 else 0
        measured = partial(input_bytes, processors=runtime.processors, invariant=self.sizes.invariant)
        work = partial(cross_attention_bytes, processors=runtime.processors)
        self.policy = dataclasses.replace(
            policy(options.get("policy", "")), inputs=measured, cross_attention_bytes=work
        )
        self.host_layers = HostLayers(runtime, cfg.host_layers, cfg.host_buffer)
        if cfg.host_layers:
            cast(HostLayerOps, ops).host_layers = self.host_layers
        self._rooms, self._fetched = StageBuffers(runtime), runtime.event()
        self.start_stopwatch = runtime.start_stopwatch
        self._no_inputs = torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def slot(self) -> SlotForm:
        """The form of a slot of VISION launches."""
        return self.sizes.slot

    @slot.setter
    def slot(self, form: SlotForm) -> None:
        self.sizes = dataclasses.replace(self.sizes, slot=form)

    def beside(self, cfg: BackendConfig) -> CudaBackend:
        """Returns a backend for a second model on the same runtime (``core.launches.draft_runner.SharedDevice``).

        Graphs of both share memory by stage, outputs included, so that both wait for copies of either's.
        """
        made = self.reopen(cfg)
        made._fetched = self._fetched
        return made

    def kv_blocks(self, wanted: int, block_bytes: int) -> int:
        return wanted

    def compilations(self) -> int:
        """Kernels compiled since this backend was made."""
        return self.runtime.compilations()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns zeros [shape] in one buffer of the runtime, at a fixed address."""
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not count:
            return torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        return self.runtime.buffer(count).view(dtype).view(tuple(shape))

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns page-locked host memory, so that copies run asynchronously and without an intermediate copy."""
        return self.runtime.allocate_pinned(shape, dtype)

    def in_order(self, copies: Callable[[], None]) -> None:
        """Runs copies on the stream of programs, which alone writes and reads the KV cache."""
        self.runtime.launch("host blocks", lambda _: copies(), None, self._no_inputs)

    def program(self, bucket: Bucket, body: nn.Module | Body) -> CudaProgram:
        return CudaProgram(bucket, body, self.sizes, self.runtime, self._rooms, self._fetched, self.library)

    def fill(self, program: Program, inputs: Inputs) -> None:
        assert isinstance(program, CudaProgram)
        program.fill(inputs)

    def fetch(self, out: TensorsOut, rows: int) -> CudaPending:
        return CudaPending(out, rows, self.runtime, self._fetched)

    def synchronize(self) -> None:
        self.runtime.synchronize()
