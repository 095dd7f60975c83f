"""An NVIDIA card as a backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trencadis.backends.cpu.backend import Alone
from trencadis.backends.cpu.memory import CpuMemory
from trencadis.backends.cuda.compilations import Compilations
from trencadis.backends.cuda.inputs import Sizes
from trencadis.backends.cuda.memory import CudaMemory
from trencadis.backends.cuda.ops import CudaOps
from trencadis.backends.cuda.policy import policy
from trencadis.backends.cuda.programs import CudaProgram, Fetched
from trencadis.core.backend import BackendConfig, Body, Comm, HeadTensorsOut, Inputs, Memory, Ops, Program
from trencadis.core.buckets import Bucket

EAGER = "cuda: launches are not captured as graphs yet; every launch runs from Python."


class CudaBackend:
    """``core.backend.Backend``.

    Args:
        device: a card; a CPU only in tests, whose kernels run in Triton's interpreter.
    """

    name = "cuda"
    values = True

    def __init__(self, cfg: BackendConfig, device: torch.device) -> None:
        options = cfg.options or {}
        self.cfg, self.device, self.dtype = cfg, device, cfg.dtype
        self.policy = policy(options.get("policy", ""))
        self.ops: Ops = CudaOps()
        self.comm: Comm = Alone()
        self._compilations = Compilations()
        processors = 132
        if device.type == "cuda":
            torch.cuda.set_device(device)
            properties = torch.cuda.get_device_properties(device)
            processors = properties.multi_processor_count
            self.label = f"cuda ({properties.name})"
            self.memory: Memory = CudaMemory(device)
            self.notes: tuple[str, ...] = (EAGER,)
        else:
            self.label = "cuda (interpreted)"
            self.memory = CpuMemory()
            self.notes = ("cuda (interpreted): kernels run in Triton's interpreter; only tests do that.",)
        self.sizes = Sizes(
            block_size=cfg.block_size, row_blocks=cfg.max_blocks_per_row, vocab=cfg.vocab_size,
            kv_heads=cfg.kv_heads or 4, processors=processors, invariant=options.get("batch_invariant") == "1",
        )  # fmt: skip

    def kv_blocks(self, wanted: int, block_bytes: int) -> int:
        return wanted

    def compilations(self) -> int:
        """Kernels compiled since this backend was made."""
        return self._compilations.count()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """On the card."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def program(self, bucket: Bucket, body: nn.Module | Body) -> CudaProgram:
        return CudaProgram(bucket, body, self.sizes, self.device)

    def fill(self, program: Program, inputs: Inputs) -> None:
        assert isinstance(program, CudaProgram)
        program.fill(inputs)

    def fetch(self, out: HeadTensorsOut, rows: int) -> Fetched:
        return Fetched(out, rows)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
