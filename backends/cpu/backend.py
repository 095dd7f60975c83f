"""The backend for the CPU, and the program of a bucket: it pads host arrays to tensors and calls a body with them."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import trencadis.backends.cpu.host_padding as host_padding
from trencadis.backends.cpu.attention_plan import CpuAttn
from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.gloo_comm import make_comm, make_pipe
from trencadis.backends.cpu.measured_kernel_choice import UNCHANGED, choice_of, choose_table
from trencadis.backends.cpu.native import dense_linear, kernel_threads
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable, with_choice
from trencadis.backends.cpu.native.kernel_library import load_library
from trencadis.backends.cpu.native.threads_on_busy_cpus import ThreadUse, thread_use
from trencadis.backends.cpu.native.weight_packing import CachedPages
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.backends.cpu.shape_policy import policy
from trencadis.core import envs
from trencadis.core.buckets import LORA, Bucket, Stage
from trencadis.core.cpu_affinity import BIND, RESERVED, available_cpus, computing_cpus, own_cpus
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device.backend import (
    BackendConfig,
    Body,
    Comm,
    HeadTensors,
    Inputs,
    Memory,
    Ops,
    PoolTensors,
    Program,
    ProgramState,
    ResetTensors,
    Segments,
    TensorsOut,
    TextTensors,
    VisionTensors,
    host_output,
)
from trencadis.core.device.launch_tensors import CrossAttentionTensors, RecurrentRows
from trencadis.core.graphs.graph_manager import WallStopwatch
from trencadis.core.host_memory import free_host, total_host
from trencadis.core.kv_cache_format import ZERO_BLOCK
from trencadis.core.launch_inputs import HeadInputs, PoolInputs, ResetInputs, StepInputs, VisionInputs
from trencadis.core.launches.host_inputs import token_adapters
from trencadis.core.launches.rank_input_batch import PersistentHeadInputs, PersistentTextInputs
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.vision_config import NO_SLOT, SlotForm

Array = NDArray[Any]

TEXT = (Stage.PREFILL, Stage.DECODE, Stage.VERIFY)
"""Stages of this backend that run the decoder."""


@dataclass(eq=False)
class CpuProgram:
    """Implements ``core.device.backend.Program`` without capture.

    Each fill makes new tensors, except for a persistent batch that has only advanced.
    """

    bucket: Bucket
    body: Body
    thread_use: ThreadUse | None = None
    state: ProgramState = ProgramState.PLANNED
    bytes: int = 0
    inputs: Any = None
    source: Inputs | None = None
    """The arrays that ``inputs`` were made of, if they may be filled in again."""

    def __post_init__(self) -> None:
        self._leaves_torch_idle = torch_is_idle(self.bucket)

    def compile(self) -> None:
        """Compiles nothing; only changes the state."""
        self.state = max(self.state, ProgramState.COMPILED)

    def rehearse(self) -> None:
        """Does nothing: before the first fill there is nothing to measure."""

    def run(self) -> Any:
        use = self.thread_use
        threads = nullcontext() if use is None else use.launch(self.bucket.dims[0], self._leaves_torch_idle)
        with threads, torch.inference_mode():
            out = self.body(self.inputs)
        self.state = max(self.state, ProgramState.COMPILED)
        return out

    def capture(self) -> None:
        """Does nothing: there are no graphs, as the policy says (``captures``)."""

    def replay(self) -> Any:
        return self.run()

    def release(self) -> int:
        self.inputs = self.source = None
        return 0


def torch_is_idle(bucket: Bucket) -> bool:
    """Returns True if the library, not torch, computes all large operations of a launch of few rows."""
    return bucket.stage in TEXT or (bucket.stage == Stage.SAMPLE and bucket.variant == "greedy")


def make_tensors(bucket: Bucket, inputs: Inputs, block_size: int, upto: bool = False) -> Any:
    """Returns the stage's tensors at the bucket's size; ``upto``: ``BackendConfig.upto``."""
    match inputs:
        case StepInputs():
            count, rows = bucket.dims if bucket.stage is Stage.PREFILL else (bucket.dims[0], bucket.dims[0])
            made = _text(inputs, count, rows, block_size, upto)
            if bucket.variant == LORA:
                return made._replace(adapter=_pad(token_adapters(inputs), count))
            return (
                made._replace(cross_attention=_make_cross_attention(inputs, count, bucket)) if bucket.variant else made
            )
        case VisionInputs():
            tensors = _vision(inputs, bucket.dims[0])
            if bucket.variant != LORA:
                return tensors
            slot, cell = map(
                torch.from_numpy, host_padding.pad_image_adapters(inputs, bucket.dims[0], len(tensors.rows))
            )
            return tensors._replace(adapter=slot, cell_adapter=cell)
        case HeadInputs():
            # Copied, because a program holds its inputs until its next fill.
            made = host_padding.head(inputs, bucket.dims[0], inputs.masks.copy())
            return HeadTensors._make(None if one is None else torch.from_numpy(one) for one in made)
        case _:
            return _make_rare_tensors(bucket, inputs)


def _refresh(made: Any, x: Inputs, block_size: int) -> Any:
    """Updates the tensors of an unchanged persistent batch in place.

    That is safe because the launch that read them has returned.
    """
    if isinstance(x, HeadInputs):
        made.uniform.numpy()[: len(x.uniform)] = x.uniform
        return made
    assert isinstance(x, StepInputs) and x.last is not None
    real, old = len(x.context), made.attn
    made.positions.numpy()[:, :real] = x.positions
    old.context.numpy()[:real] = x.context
    old.slot_map.numpy()[:real] = host_padding.last_slots(x.last, x.context, block_size)
    blocks = _blocks(x, len(old.context))
    return made._replace(attn=_attn(block_size, old.row_start, old.context, blocks, old.slot_map))


def _make_rare_tensors(bucket: Bucket, inputs: ResetInputs | PoolInputs) -> Any:
    """Makes the tensors of RESET and POOL launches."""
    match inputs:
        case ResetInputs():
            counts = host_padding.pad(inputs.counts, (bucket.dims[0], inputs.counts.shape[1]), np.int32)
            return ResetTensors(*map(torch.from_numpy, host_padding.reset(inputs, bucket.dims[0], counts)))
        case PoolInputs():
            return PoolTensors(*map(torch.from_numpy, host_padding.pool(inputs, bucket.dims[0])))


def _text(x: StepInputs, count: int, rows: int, block_size: int, upto: bool) -> TextTensors:
    """Builds the tensors of a text launch. Surplus tokens form the last row: they read ZERO, are stored in SINK, and
    their hidden state goes to row 0.
    """
    real, real_rows = len(x.tokens), len(x.context)
    row_start = np.full(rows + 2, real, np.int32)
    row_start[: real_rows + 1] = x.row_start[: real_rows + 1]
    row_start[-1] = count
    stored = torch.from_numpy(host_padding.slot_map(x, count, block_size))
    parts = torch.from_numpy(row_start), _pad(x.context, rows + 1), _blocks(x, rows + 1), stored
    return TextTensors(
        tokens=_pad(x.tokens, count),
        from_slot=_pad(x.from_slot, count),
        positions=_pad(x.positions, 3, count),
        image_row=_pad(x.image_row, count),
        out_row=_pad(x.out_row, count, dtype=np.int64),
        attn=_attn(block_size, *parts, _pad(host_padding.visible_ends(x), count) if upto else None),
    )


def _attn(block_size: int, *parts: Tensor | None) -> CpuAttn:
    """Builds ``CpuAttn`` from the fields of ``Attn`` in order, without a plan yet."""
    made = CpuAttn(*parts)  # type: ignore[arg-type]
    made.block_size, made.plans = block_size, {}
    return made


def _make_cross_attention(x: StepInputs, count: int, bucket: Bucket) -> CrossAttentionTensors | None:
    found = host_padding.pad_cross_attention(x, count, planned_units(bucket.variant))
    return None if found is None else CrossAttentionTensors(*map(torch.from_numpy, found))


def _blocks(x: StepInputs, rows: int) -> Tensor:
    """Returns block tables, then ZERO blocks, [rows, width]; a view if possible, since a launch has finished when it
    returns.
    """
    if x.table is not None and rows <= len(x.table):
        return torch.from_numpy(x.table[:rows, : x.blocks.shape[1]])
    return _pad(x.blocks, rows, x.blocks.shape[1], value=ZERO_BLOCK)


def _vision(x: VisionInputs, slots: int) -> VisionTensors:
    """Builds the tensors of a VISION launch. Padding windows write to the SINK row."""
    (segment, real), padding_window = (
        host_padding.windows(x, slots),
        None if x.padding_window is None else host_padding.flag_padding_windows(x, slots),
    )
    made = VisionTensors(
        pixels=_pad(x.pixels, slots, x.pixels.shape[1], dtype=np.uint8),
        position=_pad(x.position, slots, x.position.shape[1]),
        rows=_pad(x.rows, host_padding.cells(x, slots, NO_SLOT), dtype=np.int64, value=SINK_ROW),
        segments=Segments(
            torch.from_numpy(segment),
            torch.from_numpy(real),
            None if padding_window is None else torch.from_numpy(padding_window),
        ),
    )
    return made if x.position_rows is None else _with_interpolation(made, x, slots)


def _with_interpolation(made: VisionTensors, x: VisionInputs, slots: int) -> VisionTensors:
    """Adds the rows of the position table and their weights to ``made``."""
    near, share = host_padding.pad_interpolation(x, slots)
    assert near is not None and share is not None
    return made._replace(position_rows=torch.from_numpy(near), position_weights=torch.from_numpy(share))


def _pad(x: Array, *shape: int, dtype: type = np.int32, value: float = 0) -> Tensor:
    return torch.from_numpy(host_padding.pad(x, shape, dtype, value))


class CpuPending:
    """A result that is already on the host; ``core.device.backend.Pending``."""

    def __init__(self, out: TensorsOut, rows: int) -> None:
        self._out: Any = host_output(out, [None if t is None else t[:rows].numpy() for t in out])

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._out


ALIASES = {"float": "float32", "half": "float16"}


def native_bfloat16() -> bool:
    """Returns True if the CPU multiplies bfloat16 itself (AVX512-BF16 or AMX).

    Elsewhere bfloat16 is several times slower than float32.
    """
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def pick_dtype(asked: str, stored: str) -> torch.dtype:
    """Returns the dtype for ``asked``: ``auto`` is the stored dtype if the CPU computes in it natively, else
    float32.
    """
    if asked == "auto":
        asked = "bfloat16" if stored == "bfloat16" and native_bfloat16() else "float32"
    dtype: torch.dtype = getattr(torch, ALIASES.get(asked, asked))
    return dtype


class CpuMemory:
    """Memory in bytes (``core.device.backend.Memory``)."""

    def total(self) -> int:
        return total_host()

    def real_kv_bytes(self) -> int | None:
        """Returns None: all memory of the device is real."""
        return None

    def free(self) -> int:
        """Returns the bytes that can still be allocated without swapping; page cache counts as free."""
        return free_host()


log = logging.getLogger("trencadis.engine")


def requested_cpus() -> tuple[str, int]:
    """Returns the environment's settings: the CPUs to bind threads to, and how many CPUs of a rank stay free."""
    return envs.get(BIND) or "auto", envs.get_int(RESERVED) or 0


def _ops(cfg: BackendConfig) -> Ops:
    if not cfg.batch_invariant and (cfg.options or {}).get("ops") == "reference":
        return ReferenceOps()
    ops = InvariantOps() if cfg.batch_invariant else CpuOps()
    if cfg.packed is not None:
        ops.pages = CachedPages(cfg.packed)
    return ops


def warn_of_threads(count: int, cfg: BackendConfig) -> None:
    """Logs one warning for all ranks of this machine if they have more threads than the process may use cores."""
    ranks, cores = cfg.ranks if cfg.local_world is None else cfg.local_world, available_cpus()
    if cfg.number == 0 and count * ranks > cores:
        log.warning(
            "cpu: %d threads are more than the %d cores that this process may use, and wait for each other: "
            "lower --threads or OMP_NUM_THREADS", count * ranks, cores,
        )  # fmt: skip


class CpuBackend:
    """``core.device.backend.Backend``. Options: policy (serving, padded), ops (fast, reference), threads, eager (1)."""

    name = "cpu"
    values = True
    slot: SlotForm = NO_SLOT

    def __init__(self, cfg: BackendConfig) -> None:
        options = cfg.options or {}
        count = int(options.get("threads") or computing_cpus())
        warn_of_threads(count, cfg)
        local = (cfg.number, cfg.ranks) if cfg.local_world is None else (cfg.local_rank or 0, cfg.local_world)
        cpus = own_cpus(*local, count, *requested_cpus())
        torch.set_num_threads(len(cpus) or count)
        if cpus:
            kernel_threads.pin_threads(cpus)
            count = len(cpus)
        self._count = count
        self.cfg = cfg
        self.label = f"cpu ({count} threads)" if cfg.ranks == 1 else f"cpu ({cfg.ranks} ranks of {count} threads)"
        self.device = torch.device("cpu")
        self.dtype = cfg.dtype
        self.policy = policy(options.get("policy", ""))
        self.ops: Ops = _ops(cfg)
        self.memory: Memory = CpuMemory()
        self.comm: Comm = make_comm(cfg)
        self.pipe = make_pipe(cfg)
        self.start_stopwatch = WallStopwatch
        if isinstance(self.ops, CpuOps):
            self.ops.table = self._choose_table(self.ops.table)
            self.ops.records = cfg.ranks == 1 and load_library().library is not None and options.get("eager") != "1"
            if cfg.rank == 0:
                log.info("cpu: %s", self.ops.table.line())
        own_rows = dense_linear.launch_rows(self.ops.table, cfg.dtype) if isinstance(self.ops, CpuOps) else 0
        self.thread_use = thread_use(count, own_rows)
        self.notes: tuple[str, ...] = ()

    def _choose_table(self, table: KernelTable) -> KernelTable:
        """Returns rank 0's choice of kernels, which may be measured (``kernel_trial``), for all ranks."""
        cfg = self.cfg
        if cfg.kernel_trial is None or cfg.batch_invariant:
            return table
        name = str(cfg.dtype).removeprefix("torch.")
        if cfg.number == 0:
            table = choose_table(table, cfg.dtype, self._count, cfg.kernel_trial)
        if cfg.ranks == 1:
            return table
        own = choice_of(table, name)
        rows = own if cfg.number == 0 else tuple(UNCHANGED for _ in own)
        least = (self.comm if self.pipe is None else self.pipe).least((*rows, table.measured if cfg.number == 0 else 1))
        return with_choice(table, name, *least[:-1]) if least[-1] else table

    def kv_blocks(self, wanted: int, block_bytes: int) -> int:
        return wanted

    def compilations(self) -> int:
        """Returns 0: nothing is compiled."""
        return 0

    def cpu_threads(self) -> int:
        """Returns the threads that compute now, without those that the system keeps from running."""
        return self._count if self.thread_use is None else self.thread_use.in_use

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns zeros in anonymous mapped memory, whose pages the system adds as they are written; torch.zeros
        writes them all.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.zeros(tuple(shape), dtype=dtype)
        return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).view(tuple(shape))

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns ordinary memory in place of a device's host memory (policy ``padded``)."""
        return self.zeros(shape, dtype)

    def in_order(self, copies: Callable[[], None]) -> None:
        """Runs the copies at once: launches have finished when they return."""
        copies()

    def program(self, bucket: Bucket, body: nn.Module | Body) -> CpuProgram:
        return CpuProgram(bucket, body, self.thread_use)

    def fill(self, program: Program, inputs: Inputs) -> None:
        assert isinstance(program, CpuProgram)
        block_size, upto = self.cfg.block_size, self.cfg.upto
        if inputs is program.source:
            program.inputs = _refresh(program.inputs, inputs, block_size)
            return
        program.inputs = make_tensors(program.bucket, inputs, block_size, upto)
        if self.cfg.recurrent and isinstance(inputs, StepInputs):
            rows = len(program.inputs.attn.context) - 1
            held = RecurrentRows(*map(torch.from_numpy, host_padding.pad_recurrent(inputs, rows)))
            program.inputs = program.inputs._replace(recurrent=held)
        comes_again = isinstance(inputs, PersistentHeadInputs) or (
            isinstance(inputs, PersistentTextInputs) and not upto
        )
        program.source = inputs if comes_again else None

    def fetch(self, out: TensorsOut, rows: int) -> CpuPending:
        return CpuPending(out, rows)

    def synchronize(self) -> None:
        """Does nothing: launches have finished when they return."""
