"""The backend for the CPU."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trencadis.backends.cpu.batch_invariant import InvariantOps
from trencadis.backends.cpu.cpu_program import CpuPending, CpuProgram
from trencadis.backends.cpu.gloo_comm import make_comm, make_pipe
from trencadis.backends.cpu.kernel_trial import UNCHANGED, choice_of, choose_table
from trencadis.backends.cpu.native import dense, threads
from trencadis.backends.cpu.native.kernel_table import KernelTable, with_choice
from trencadis.backends.cpu.native.thread_use import thread_use
from trencadis.backends.cpu.native.weight_packing import CachedPages
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.policy import policy
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core import envs
from trencadis.core.buckets import Bucket
from trencadis.core.cpu_affinity import BIND, RESERVED, available_cpus, computing_cpus, own_cpus
from trencadis.core.device.backend import BackendConfig, Body, Comm, Inputs, Memory, Ops, Program, TensorsOut
from trencadis.core.host_memory import free_host, total_host
from trencadis.core.vision_config import NO_SLOT, SlotForm

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
    """``core.device.backend.Backend``. Options: policy (serving, padded), ops (fast, reference), threads."""

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
            threads.pin_threads(cpus)
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
        if isinstance(self.ops, CpuOps):
            self.ops.table = self._choose_table(self.ops.table)
            if cfg.rank == 0:
                log.info("cpu: %s", self.ops.table.line())
        own_rows = dense.launch_rows(self.ops.table, cfg.dtype) if isinstance(self.ops, CpuOps) else 0
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
        told = own if cfg.number == 0 else tuple(UNCHANGED for _ in own)
        least = (self.comm if self.pipe is None else self.pipe).least((*told, table.measured if cfg.number == 0 else 1))
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
        program.fill(inputs, self.cfg.block_size, self.cfg.upto, self.cfg.recurrent)

    def fetch(self, out: TensorsOut, rows: int) -> CpuPending:
        return CpuPending(out, rows)

    def synchronize(self) -> None:
        """Does nothing: launches have finished when they return."""
