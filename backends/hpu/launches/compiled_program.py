"""A bucket in compile mode: one compiled launch and no graph."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.launches.program import BodyModule, HpuProgram
from trencadis.backends.hpu.ops import HpuOps
from trencadis.core.backend import Body, ProgramState
from trencadis.core.buckets import Bucket


class CompiledProgram(HpuProgram):
    """``core.backend.Program``, PLANNED -> COMPILED.

    Each bucket compiles a copy of the launch with a code object of its own, so that its guards are its own.
    """

    def __init__(self, bucket: Bucket, body: Body, bridge: Bridge, ops: HpuOps, block_size: int, vocab: int) -> None:
        super().__init__(bucket, bridge, block_size, vocab)
        self._compiled = bridge.compile(own_code(BodyModule(body, ops)))

    def run(self) -> Any:
        """One launch."""
        with self.on_device():
            out = self._compiled(self.inputs)
        self.state = max(self.state, ProgramState.COMPILED)
        return out

    def replay(self) -> Any:
        """One launch: there is nothing faster."""
        return self.run()

    def capture(self) -> None:
        """Nothing: HPU graphs exist in lazy mode alone, and the program stays COMPILED."""

    def release(self) -> int:
        """Nothing comes back: 0 bytes."""
        return 0


def own_code(launch: BodyModule) -> BodyModule:
    """``launch`` with a ``forward`` whose code object is its own: compiled variants are kept per code object."""
    plain: Any = BodyModule.forward
    copy = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__)
    made: Any = launch
    made.forward = copy.__get__(launch)
    return launch
