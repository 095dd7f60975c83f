"""A bucket on Gaudi: static input tensors, one wrapped (or compiled) launch, and its way to CAPTURED."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.inputs import arrays
from trencadis.backends.hpu.ops import HpuOps
from trencadis.core.backend import Body, HeadTensorsOut, Inputs, OutOfDeviceMemory, ProgramState
from trencadis.core.buckets import Bucket
from trencadis.core.step import HeadOutput


class BodyModule(nn.Module):
    """What is wrapped: a module whose ``forward`` is the body. Its inputs are tensors in tuples, nothing else."""

    def __init__(self, body: Body, ops: HpuOps) -> None:
        super().__init__()
        self.body, self.ops = body, ops

    def forward(self, inputs: Any) -> Any:
        self.ops.begin()
        return self.body(inputs)


class HpuProgram:
    """``core.backend.Program``.

    Lazy mode: one wrapper object per bucket, so that giving it up gives up one graph. Compile mode: a copy of the
    launch with a code object of its own, so that each bucket has its own guards; such a program stays COMPILED.
    """

    def __init__(self, bucket: Bucket, body: Body, bridge: Bridge, ops: HpuOps, block_size: int, vocab: int) -> None:
        self.bucket, self.bridge = bucket, bridge
        self.block_size, self.vocab = block_size, vocab
        self.state = ProgramState.PLANNED
        blank = arrays(bucket, None, block_size, vocab)
        self._sent = _leaves(blank)
        self.inputs = _tree(blank, lambda a: torch.from_numpy(a).to(bridge.device))
        self.input_bytes = sum(t.numel() * t.element_size() for t in _leaves(self.inputs))
        self.bytes = self.input_bytes
        self._lazy = bridge.is_lazy()
        launch = BodyModule(body, ops)
        self._module: Any = bridge.wrap_in_hpu_graph(launch) if self._lazy else bridge.compile(own_code(launch))

    def fill(self, inputs: Inputs | None) -> None:
        """Queues copies of the host arrays that differ from those sent last.

        Arrays are made anew each time, so none is refilled before its copy has run.
        """
        filled = _leaves(arrays(self.bucket, inputs, self.block_size, self.vocab))
        for target, last, source in zip(_leaves(self.inputs), self._sent, filled, strict=True):
            if not np.array_equal(last, source):
                target.copy_(torch.from_numpy(source), non_blocking=True)
        self._sent = filled

    def compile(self) -> None:
        """Makes the recipes, computing as little as the device allows."""
        with self.bridge.compile_only():
            self.run()

    def rehearse(self) -> None:
        """A launch of what the buffers hold; an emulated card leaves the values out."""
        with self.bridge.compile_only() if self.bridge.emulated else nullcontext():
            self.replay()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Runs without gradients; the device's own error for a lack of memory becomes the engine's."""
        try:
            with torch.no_grad():
                yield
        except RuntimeError as error:
            if self.bridge.out_of_memory(error):
                raise OutOfDeviceMemory(str(error)) from error
            raise

    def run(self) -> Any:
        with self._on_device():
            if self._lazy:
                out = self._module.forward(self.inputs, bypass_hpu_graphs=True)
                self.bridge.mark_step()
            else:
                out = self._module(self.inputs)
        self.state = max(self.state, ProgramState.COMPILED)
        return out

    def capture(self) -> None:
        """Lazy mode only: the first call of the wrapper records the graph, whose bytes are measured."""
        if not self._lazy or self.state is ProgramState.CAPTURED:
            return
        before = self.bridge.mem_get_info()[0]
        with self._on_device(), self.bridge.compile_only():
            self._module.forward(self.inputs)
        self.bridge.synchronize()
        self.bytes = self.input_bytes + max(before - self.bridge.mem_get_info()[0], 0)
        self.state = ProgramState.CAPTURED

    def replay(self) -> Any:
        """Valid until the next replay of this bucket: the graph writes the same tensors each time."""
        if self.state is not ProgramState.CAPTURED:
            return self.run()
        with self._on_device():
            return self._module.forward(self.inputs)

    def release(self) -> int:
        """Gives the graph up; returns the bytes that really came back."""
        if self.state is not ProgramState.CAPTURED:
            return 0
        before = self.bridge.mem_get_info()[0]
        self._module.clear_cache()
        self.bridge.synchronize()
        self.state, self.bytes = ProgramState.COMPILED, self.input_bytes
        return max(self.bridge.mem_get_info()[0] - before, 0)


class HpuPending:
    """Outputs on the host; ``core.backend.Pending``.

    The copies block. One into ordinary memory that does not is finished by a thread of the plug-in, of which no event
    tells: what is read after the event may be what the memory held before.
    """

    def __init__(self, out: HeadTensorsOut, rows: int) -> None:
        self._out = HeadOutput(*(None if t is None else t.cpu()[:rows].numpy() for t in out))  # type: ignore[arg-type]

    def done(self) -> bool:
        """Whether ``result`` would not wait."""
        return True

    def result(self) -> HeadOutput:
        """What was copied."""
        return self._out


def own_code(launch: BodyModule) -> BodyModule:
    """``launch`` with a ``forward`` whose code object is its own: compiled variants are kept per code object."""
    plain: Any = BodyModule.forward
    copy = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__)
    made: Any = launch
    made.forward = copy.__get__(launch)
    return launch


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree]


def _tree(tree: Any, make: Any) -> Any:
    """``tree`` with ``make`` applied to its arrays, named tuples kept."""
    if isinstance(tree, tuple):
        return type(tree)(*(_tree(item, make) for item in tree))
    assert isinstance(tree, np.ndarray | Tensor)
    return make(tree)
