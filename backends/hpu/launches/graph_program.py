"""A bucket in lazy mode: one wrapped launch, captured into one HPU graph."""

from __future__ import annotations

from typing import Any

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.launches.hpu_inputs import LaunchForm
from trencadis.backends.hpu.launches.hpu_program import BodyModule, HpuProgram, LaunchContexts
from trencadis.backends.hpu.launches.input_packing import cast_inputs
from trencadis.backends.hpu.ops import HpuOps
from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import Body, ProgramState


class GraphProgram(HpuProgram):
    """``core.device.backend.Program``, PLANNED -> COMPILED -> CAPTURED.

    Each bucket has a wrapper object of its own, so that releasing it frees one graph.
    """

    def __init__(
        self,
        bucket: Bucket,
        body: Body,
        bridge: Bridge,
        ops: HpuOps,
        form: LaunchForm,
        contexts: LaunchContexts,
    ) -> None:
        super().__init__(bucket, bridge, form, contexts)
        self._module: Any = bridge.wrap_in_hpu_graph(BodyModule(cast_inputs(self.static.types, body), ops))

    def run(self) -> Any:
        """Runs one launch without the graph."""
        with self.on_device():
            out = self._module.forward(self.inputs, bypass_hpu_graphs=True)
            self.bridge.mark_step()
            self.prove()
        self.state = max(self.state, ProgramState.COMPILED)
        return out

    def capture(self) -> None:
        """Captures the graph by the first call of the wrapper, and measures its bytes.

        Raises:
            OutOfDeviceMemory: the graph does not fit; the program stays COMPILED.
        """
        if self.state is ProgramState.CAPTURED:
            return
        before = self.bridge.mem_get_info()[0]
        with self.on_device():
            with self.compile_mode():
                self._module.forward(self.inputs)
            self.bridge.synchronize()
        self.proven = False  # what runs from now on is the graph
        self.bytes = self.static.bytes + max(before - self.bridge.mem_get_info()[0], 0)
        self.state = ProgramState.CAPTURED

    def replay(self) -> Any:
        """Replays the graph. Outputs are valid until the next replay of this bucket, which writes the same tensors."""
        if self.state is not ProgramState.CAPTURED:
            return self.run()
        with self.on_device():
            out = self._module.forward(self.inputs)
            self.prove()
        return out

    def release(self) -> int:
        """Frees the graph; returns the bytes that the card really got back."""
        if self.state is not ProgramState.CAPTURED:
            return 0
        before = self.bridge.mem_get_info()[0]
        self._module.clear_cache()
        self.bridge.synchronize()
        self.state, self.bytes = ProgramState.COMPILED, self.static.bytes
        return max(self.bridge.mem_get_info()[0] - before, 0)
