"""A bucket on an NVIDIA card: static input tensors and a body that is called. Nothing is captured so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.cuda.buffers import Buffers
from trencadis.backends.cuda.inputs import Sizes
from trencadis.core.backend import Body, HeadTensorsOut, Inputs, OutOfDeviceMemory, State
from trencadis.core.buckets import Bucket
from trencadis.core.step import HeadOutput


class CudaProgram:
    """``core.backend.Program``."""

    def __init__(self, bucket: Bucket, body: Body, sizes: Sizes, device: torch.device) -> None:
        self.bucket, self.body = bucket, body
        self.state = State.PLANNED
        with _on_device():
            self.buffers = Buffers(bucket, sizes, device)
        self.bytes = self.buffers.bytes
        self._interpreted = device.type == "cpu"

    @property
    def inputs(self) -> Any:
        """The stage's tensors, at fixed addresses."""
        return self.buffers.tensors

    def fill(self, inputs: Inputs | None) -> None:
        """Queues the copy of ``inputs``; ``None``: padding alone."""
        self.buffers.fill(inputs)

    def compile(self) -> None:
        """A launch of what the buffers hold: Triton compiles a kernel when it is first called; nothing is compiled
        where it interprets."""
        if self._interpreted:
            self.state = max(self.state, State.COMPILED)
        else:
            self.run()

    def rehearse(self) -> None:
        """A launch of what the buffers hold; an interpreted one would take minutes and show nothing."""
        if not self._interpreted:
            self.run()

    def run(self) -> Any:
        with _on_device(), torch.inference_mode():
            out = self.body(self.inputs)
        self.state = max(self.state, State.COMPILED)
        return out

    def capture(self) -> None:
        """Nothing is captured; the bucket stays COMPILED."""

    def replay(self) -> Any:
        return self.run()

    def release(self) -> int:
        return 0


@contextmanager
def _on_device() -> Iterator[None]:
    """torch's error for a lack of memory becomes the engine's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(str(error)) from error


class Fetched:
    """Outputs on their way to the host; ``core.backend.Pending``."""

    def __init__(self, out: HeadTensorsOut, rows: int) -> None:
        self._event: torch.cuda.Event | None = None
        self._host: list[Tensor | None] = []
        for t in out:
            part = None if t is None else t[:rows]
            if part is not None and part.is_cuda:
                part = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
            self._host.append(part)
        if out.token.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def done(self) -> bool:
        """Whether ``result`` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> HeadOutput:
        """Waits for the copies."""
        if self._event is not None:
            self._event.synchronize()
        return HeadOutput(*(None if t is None else t.numpy() for t in self._host))  # type: ignore[arg-type]
