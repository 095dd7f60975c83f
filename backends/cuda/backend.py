"""The backend for an NVIDIA card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from trencadis.backends.cpu.gloo_comm import SingleRank
from trencadis.backends.cuda.cuda_program import AttentionLibrary, CudaPending, CudaProgram
from trencadis.backends.cuda.host_layers import HostLayerOps, HostLayers
from trencadis.backends.cuda.launches.cuda_inputs import Sizes
from trencadis.backends.cuda.launches.input_buffers import StageBuffers
from trencadis.backends.cuda.launches.input_sizes import cross_attention_bytes, input_bytes
from trencadis.backends.cuda.policy import policy
from trencadis.backends.cuda.runtime_protocol import Runtime
from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import BackendConfig, Body, Comm, Inputs, Memory, Ops, Pipe, Program, TensorsOut
from trencadis.core.vision_config import SlotForm

TWIN = "cuda (twin): no card computes here; launches, copies and graphs are imitated on the CPU, for tests only."
INTERPRETED = "cuda (interpreted): kernels run in Triton's interpreter, for tests only."


@runtime_checkable
class BlockingOps(Protocol):
    """Ops whose attention takes queries in planned blocks (``ops.CudaOps``)."""

    query_group: int


class CudaBackend:
    """``core.device.backend.Backend`` over a runtime: a card's, or its twin on the CPU.

    Attributes:
        library: attention library in place of this engine's kernels, set before programs are made.
    """

    name = "cuda"
    values = True
    library: AttentionLibrary | None = None

    def __init__(self, cfg: BackendConfig, runtime: Runtime, ops: Ops, comm: Comm | None = None) -> None:
        options = cfg.options or {}
        self.cfg, self.dtype = cfg, cfg.dtype
        self.runtime, self.device, self.label = runtime, runtime.device, runtime.label
        self.ops = ops
        self.comm: Comm = comm or SingleRank()
        self.pipe: Pipe | None = None
        self.memory: Memory = runtime.memory
        self.hooks = runtime.hooks
        self.notes: tuple[str, ...] = getattr(comm, "notes", ())
        if runtime.device.type == "cpu":
            self.notes += (INTERPRETED if runtime.interprets else TWIN,)
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
        self._no_inputs = torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def slot(self) -> SlotForm:
        """The form of a slot of VISION launches."""
        return self.sizes.slot

    @slot.setter
    def slot(self, form: SlotForm) -> None:
        self.sizes = dataclasses.replace(self.sizes, slot=form)

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
