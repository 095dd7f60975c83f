"""A bucket in compile mode: compiled regions, or one compiled launch, and no graph."""

from __future__ import annotations

from functools import partial
from typing import Any

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.launches.compiled_regions import own_code, part
from trencadis.backends.hpu.launches.hpu_inputs import LaunchForm
from trencadis.backends.hpu.launches.hpu_program import HpuProgram, LaunchContexts
from trencadis.backends.hpu.ops import HpuOps
from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import Body, ProgramState


class CompiledProgram(HpuProgram):
    """``core.device.backend.Program``, PLANNED -> COMPILED.

    If the ops compile regions, the body itself is plain Python between them; otherwise each bucket compiles its body
    as a whole, with a code object of its own, so that its guards are its own. The ops take the types of a packing, so
    that no conversion runs outside of compiled regions.
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
        regional = ops.regions is not None
        whole: Any = part if regional else ops.compiler.compile(partial(own_code, part), str(bucket))
        self._launch = partial(whole, body)

    def run(self) -> Any:
        """Runs one launch."""
        with self.on_device():
            with self.contexts.launch():
                out = self._launch(self.inputs)
            self.prove()
        self.state = max(self.state, ProgramState.COMPILED)
        return out

    def replay(self) -> Any:
        """Runs one launch: compile mode has nothing faster."""
        return self.run()

    def capture(self) -> None:
        """Does nothing: HPU graphs exist in lazy mode only, and the program stays COMPILED."""

    def release(self) -> int:
        """Frees nothing and returns 0 bytes."""
        return 0
