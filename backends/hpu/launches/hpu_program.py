"""The programs of a bucket: one wrapped launch in an HPU graph (lazy mode), or compiled regions (compile mode)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from trencadis.backends.hpu.habana_bridge import Bridge, is_compiler_failure, join_lines
from trencadis.backends.hpu.launches.hpu_host_arrays import LaunchForm
from trencadis.backends.hpu.launches.input_and_output_copies import (
    HostOutputPool,
    OutputSets,
    StaticInputs,
    cast_inputs,
    named_errors,
)
from trencadis.backends.hpu.launches.region_compiler import is_dynamos, own_code, part
from trencadis.backends.hpu.ops import HpuOps
from trencadis.backends.hpu.shape_policy import list_held_outputs
from trencadis.core.buckets import Bucket, target_bucket
from trencadis.core.device.backend import Body, Inputs, OutOfDeviceMemory, ProgramState
from trencadis.core.errors import StartupError, format_error

log = logging.getLogger("trencadis.engine")


class BodyModule(nn.Module):
    """The body as a module, which can be wrapped in a graph or compiled. Its inputs are tensors in tuples, nothing
    else.
    """

    def __init__(self, body: Callable[..., object], ops: HpuOps) -> None:
        super().__init__()
        self.body, self.ops = body, ops

    def forward(self, *inputs: object) -> object:
        self.ops.begin()
        return self.body(*inputs)


class LaunchContexts(NamedTuple):
    """Context managers to enter around launches: empty for a real card, hooks for an emulated one."""

    launch: Callable[[], AbstractContextManager[Any]] = nullcontext
    rehearsal: Callable[[], AbstractContextManager[Any]] = nullcontext


class HpuProgram:
    """The part of ``core.device.backend.Program`` that both modes share."""

    def __init__(
        self,
        bucket: Bucket,
        body: Body,
        bridge: Bridge,
        ops: HpuOps,
        form: LaunchForm,
        contexts: LaunchContexts,
    ) -> None:
        self.bucket, self.bridge, self.contexts, self._compiler = bucket, bridge, contexts, ops.compiler
        self.state = ProgramState.PLANNED
        forms = list_held_outputs(bucket) if bridge.is_lazy() else ()
        self.outputs = OutputSets(forms, bucket.dims[0], bridge.device) if forms else None
        self.static = StaticInputs(target_bucket(bucket), bridge, form, self.outputs)
        self.bytes = self.static.bytes
        self.proven, self.compiling = False, False
        self.landing: HostOutputPool | None = None
        self.compiles_for_real = False
        """True: launches run while they are compiled and captured, outside of the plug-in's compile-only mode."""
        self._prepare(body, ops)

    def _prepare(self, body: Body, ops: HpuOps) -> None:
        """Makes what launches ``body``: a graph's wrapper or a compiled function."""
        raise NotImplementedError

    @property
    def inputs(self) -> Any:
        """The input tensors in the types that they are copied in: views, which checks may write to between launches."""
        return self.static.tensors

    def fill(self, inputs: Inputs | None) -> None:
        """Queues the copies of a launch's host arrays; the rest of the bucket becomes inert padding."""
        self.static.fill(inputs)

    def compile(self) -> None:
        """Makes the recipes, computing as little as the device allows.

        Where the plug-in's graph compiler fails in compile-only mode, the launch is compiled by running it.
        """
        try:
            with self.compile_mode():
                out = self.run()
        except RuntimeError as error:
            if isinstance(error, OutOfDeviceMemory) or self.compiles_for_real or is_dynamos(error):
                raise
            log.warning("hpu: %s cannot be compiled without running (%s); it is run.", self.bucket, format_error(error))
            out = self.run()
        if self.landing is not None:
            with named_errors(self.bridge):
                self.landing.prepare(out)

    @contextmanager
    def compile_mode(self) -> Iterator[None]:
        """Enters the mode in which launches make recipes and compute as little as the device allows."""
        real = self.compiles_for_real
        before, self.compiling = self.compiling, not real
        self._compiler.dry = not real
        try:
            with (self.contexts.rehearsal if real else self.bridge.compile_only)():
                yield
        finally:
            self.compiling, self._compiler.dry = before, False

    def rehearse(self) -> None:
        """Runs a launch on the current contents of the buffers; an emulated card leaves the values out.

        Raises:
            StartupError: one line, if the card's graph compiler refuses a recipe of it.
        """
        try:
            with self.contexts.rehearsal():
                self.replay()
        except RuntimeError as error:
            if not is_compiler_failure(error):
                raise
            raise StartupError(
                f"hpu: the card's graph compiler refuses {self.bucket} ({join_lines(error)}): try the other mode "
                "(PT_HPU_LAZY_MODE) or another release"
            ) from None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Runs the block without gradients; converts the device's out-of-memory error to OutOfDeviceMemory."""
        with named_errors(self.bridge), torch.no_grad():
            yield

    def prove(self) -> None:
        """Waits for the first launch that really runs, so that its late errors are raised in the place of the launch.

        The thread that launches recipes takes their workspace, and what fails there is otherwise raised by a later
        call. The workspace never shrinks, so later launches of the bucket find it.
        """
        if not (self.proven or self.compiling):
            self.bridge.synchronize()
            self.proven = True

    def run(self) -> Any:
        """Runs one launch without a graph."""
        raise NotImplementedError

    def replay(self) -> Any:
        """Runs one launch in the fastest way that the program's state offers."""
        raise NotImplementedError


class GraphProgram(HpuProgram):
    """``core.device.backend.Program``, PLANNED -> COMPILED -> CAPTURED.

    Each bucket has a wrapper object of its own, so that releasing it frees one graph.
    """

    def _prepare(self, body: Body, ops: HpuOps) -> None:
        typed = cast_inputs(self.static.types, body)
        made = BodyModule(typed if self.outputs is None else self.outputs.bind(typed), ops)
        self._module: Any = self.bridge.wrap_in_hpu_graph(made)

    def _forward(self, **how: bool) -> object:
        """Calls the wrapped module; returns the outputs of the launch."""
        if self.outputs is None:
            return self._module.forward(self.inputs, **how)
        held = self.outputs.wait()
        self._module.forward(self.inputs, self.static.turn, **how)
        return held

    def run(self) -> Any:
        """Runs one launch without the graph."""
        with self.on_device():
            out = self._forward(bypass_hpu_graphs=True)
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
                self._forward()
            self.bridge.synchronize()
        self.proven = False  # what runs from now on is the graph
        self.bytes = self.static.bytes + max(before - self.bridge.mem_get_info()[0], 0)
        self.state = ProgramState.CAPTURED

    def replay(self) -> Any:
        """Replays the graph. Outputs are valid until the next replay of this bucket, or the next but one."""
        if self.state is not ProgramState.CAPTURED:
            return self.run()
        with self.on_device():
            out = self._forward()
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


class CompiledProgram(HpuProgram):
    """``core.device.backend.Program``, PLANNED -> COMPILED.

    If the ops compile regions, the body itself is plain Python between them; otherwise each bucket compiles its body
    as a whole, with a code object of its own, so that its guards are its own. The ops take the types of a packing, so
    that no conversion runs outside of compiled regions.
    """

    def _prepare(self, body: Body, ops: HpuOps) -> None:
        regional = ops.regions is not None
        whole: Any = part if regional else ops.compiler.compile(partial(own_code, part), str(self.bucket))
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
