"""The device: its name, its policy, and how inputs and results of launches move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trencadis.backends.cpu.backend import CpuMemory
from trencadis.backends.cpu.gloo_comm import SingleRank
from trencadis.core.buckets import MIXED_AXES, Bucket, Stage
from trencadis.core.device.backend import BackendConfig, Body, Inputs, TensorsOut, host_output
from trencadis.core.device_shape_policy import Policy
from trencadis_numpy.ops import NumpyOps
from trencadis_numpy.programs import NumpyProgram

POLICY = Policy(
    axes=MIXED_AXES,
    alignment={
        Stage.PREFILL: (8, 2),
        Stage.DECODE: (2,),
        Stage.VISION: (64,),
        Stage.SAMPLE: (2,),
        Stage.RESET: (2,),
        Stage.POOL: (2,),
    },
)
"""Prompts and decoding rows share a launch; sizes are rounded up a little, so that buckets are used again."""


class Fetched:
    """A result on the host, copied, because the next launch may write the same memory."""

    def __init__(self, out: TensorsOut, rows: int) -> None:
        self._out: Any = host_output(out, [None if t is None else t[:rows].clone().numpy() for t in out])

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._out


class NumpyBackend:
    """``trencadis.core.device.backend.Backend``."""

    name = "numpy"
    values = True
    slot: Any = None

    def __init__(self, cfg: BackendConfig) -> None:
        self.cfg = cfg
        self.label = "numpy"
        self.device = torch.device("cpu")
        self.dtype = cfg.dtype
        self.policy = POLICY
        self.ops = NumpyOps()
        self.memory = CpuMemory()
        self.comm = SingleRank()
        self.notes = ("numpy: an example of a backend; it is not meant to be fast.",)

    def kv_blocks(self, wanted: int, block_bytes: int) -> int:
        return wanted

    def compilations(self) -> int:
        """Nothing is compiled."""
        return 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def program(self, bucket: Bucket, body: nn.Module | Body) -> NumpyProgram:
        return NumpyProgram(bucket, body, self.cfg)

    def fill(self, program: NumpyProgram, inputs: Inputs) -> None:
        program.fill(inputs)

    def fetch(self, out: TensorsOut, rows: int) -> Fetched:
        return Fetched(out, rows)

    def synchronize(self) -> None:
        """numpy is always done."""
