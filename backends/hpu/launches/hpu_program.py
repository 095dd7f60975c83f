"""Parts that both kinds of HPU programs share: static inputs, the body as a module, errors of the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.launches.device_errors import named_errors
from trencadis.backends.hpu.launches.host_copies import HostOutputPool, StaticInputs
from trencadis.backends.hpu.launches.hpu_inputs import LaunchForm
from trencadis.backends.hpu.launches.region_compiler import is_dynamos
from trencadis.backends.hpu.ops import HpuOps
from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import Body, Inputs, OutOfDeviceMemory, ProgramState
from trencadis.core.graphs.oom_errors import format_error

log = logging.getLogger("trencadis.engine")


class BodyModule(nn.Module):
    """The body as a module, which can be wrapped in a graph or compiled. Its inputs are tensors in tuples, nothing
    else.
    """

    def __init__(self, body: Body, ops: HpuOps) -> None:
        super().__init__()
        self.body, self.ops = body, ops

    def forward(self, inputs: Any) -> Any:
        self.ops.begin()
        return self.body(inputs)


class LaunchContexts(NamedTuple):
    """Context managers to enter around launches: empty for a real card, hooks for an emulated one."""

    launch: Callable[[], AbstractContextManager[Any]] = nullcontext
    rehearsal: Callable[[], AbstractContextManager[Any]] = nullcontext


class HpuProgram:
    """The part of ``core.device.backend.Program`` that both modes share."""

    def __init__(self, bucket: Bucket, bridge: Bridge, form: LaunchForm, contexts: LaunchContexts) -> None:
        self.bucket, self.bridge, self.contexts = bucket, bridge, contexts
        self.state = ProgramState.PLANNED
        self.static = StaticInputs(bucket, bridge, form)
        self.bytes = self.static.bytes
        self.proven, self.compiling = False, False
        self.landing: HostOutputPool | None = None
        self.compiles_for_real = False
        """True: launches run while they are compiled and captured, outside of the plug-in's compile-only mode."""

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
                self.run()
        except RuntimeError as error:
            if isinstance(error, OutOfDeviceMemory) or self.compiles_for_real or is_dynamos(error):
                raise
            log.warning("hpu: %s cannot be compiled without running (%s); it is run.", self.bucket, format_error(error))
            self.run()

    @contextmanager
    def compile_mode(self) -> Iterator[None]:
        """Enters the mode in which launches make recipes and compute as little as the device allows."""
        real = self.compiles_for_real
        before, self.compiling = self.compiling, not real
        try:
            with (self.contexts.rehearsal if real else self.bridge.compile_only)():
                yield
        finally:
            self.compiling = before

    def rehearse(self) -> None:
        """Runs a launch on the current contents of the buffers; an emulated card leaves the values out."""
        with self.contexts.rehearsal():
            out = self.replay()
        if self.landing is not None and self.contexts.rehearsal is nullcontext:
            self.landing.prepare(out)

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
