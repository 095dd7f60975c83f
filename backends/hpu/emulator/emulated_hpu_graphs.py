"""``wrap_in_hpu_graph`` as the bridge does it: one graph per key, inputs copied to the tensors of the first call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trencadis.backends.hpu.emulator.device_tensor import DeviceTensor, flatten
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.launch_recording_and_replay import CaptureRecording, Scope


@dataclass(slots=True)
class EmulatedGraph:
    """One graph: the inputs that it was captured with, its outputs, and the bytes that it holds."""

    inputs: Any
    outputs: Any
    recording: CaptureRecording
    bytes: int
    piece: int
    seconds: float = 0.0
    """Virtual seconds of a replay."""


@dataclass(frozen=True, slots=True)
class LaunchTrace:
    """Figures of one launch.

    Args:
        ops: number of operations.
        peak: peak bytes of its workspace.
        kept: bytes of the tensors that crossed a cut, each counted once.
        collective: bytes of results of collectives, which a graph always keeps.
    """

    outputs: Any
    ops: int
    peak: int
    kept: int
    collective: int

    @classmethod
    def of(cls, outputs: Any, scope: Scope) -> LaunchTrace:
        """Returns the trace of a launch that has ended."""
        return cls(outputs, scope.ops, scope.live.peak, scope.live.kept, scope.collective)


def key(tree: Any) -> Hashable:
    """Returns the key of a graph: shape, strides and offset of tensors, hashes of other values; containers are
    walked.
    """
    if isinstance(tree, dict):
        return tuple((name, key(value)) for name, value in tree.items())
    if isinstance(tree, list | tuple):
        return tuple(key(item) for item in tree)
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tuple(tree.stride()), tree.storage_offset())
    return hash(tree)


def copy_inputs(target: Any, source: Any) -> None:
    """Copies tensors in dicts, lists and tuples from ``source`` to ``target``; those in other objects are not
    copied.
    """
    if isinstance(target, dict):
        for name, value in target.items():
            copy_inputs(value, source[name])
    elif isinstance(target, list | tuple):
        for one, other in zip(target, source, strict=True):
            copy_inputs(one, other)
    elif isinstance(target, Tensor) and target is not source:
        target.copy_(source, non_blocking=True)


class HpuGraphs:
    """The graphs of one wrapped module.

    Args:
        cached: a graph keeps the outputs of all its recipes; False: only the launch's own outputs, which are marked.
    """

    def __init__(
        self, device: EmulatedDevice, forward: Callable[..., Any], max_graphs: int | None, cached: bool
    ) -> None:
        self.device, self.original, self.max_graphs, self.cached = device, forward, max_graphs, cached
        self.cache: dict[Hashable, EmulatedGraph] = {}
        self.traced: dict[Hashable, LaunchTrace] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Captures at the first call with a key, replays at later ones."""
        warmup = kwargs.pop("warmup_mode", False)
        if kwargs.pop("bypass_hpu_graphs", False):
            return self.run(args, kwargs)
        found = self.cache.get(key((args, kwargs)))
        if found is None:
            if self.max_graphs is not None and len(self.cache) >= self.max_graphs:
                return self.run(args, kwargs)
            found = self.cache[key((args, kwargs))] = self.capture(args, kwargs)
        elif warmup:
            return found.outputs
        else:
            self.device.faults.reach("step", self.device.allocator.free)
            copy_inputs(found.inputs, (args, kwargs))
            self.device.clock.launched += found.seconds
        if self.device.computes and not self.device.compile_only:
            self.device.queue.push(found.recording.replay)
        return found.outputs

    def run(self, args: Any, kwargs: Any) -> Any:
        """Runs the Python body without capture; without values a launch that was traced before is not traced again."""
        if self.device.computes:
            with self.device.launch():
                return self.original(*args, **kwargs)
        return self._trace("step", args, kwargs).outputs

    def _trace(self, kind: str, args: Any, kwargs: Any) -> LaunchTrace:
        """Returns the figures of a launch on a card without values; ``kind``: the kind of fault that may be
        injected.
        """
        device, name = self.device, key((args, kwargs))
        found = self.traced.get(name)
        if found is None:
            with device.launch(kind=kind) as scope:
                outputs = self.original(*args, **kwargs)
            found = self.traced[name] = LaunchTrace.of(outputs, scope)
        else:
            device.begin_launch(kind)
            device.allocator.grow_workspace(found.peak)
        return found

    def capture(self, args: Any, kwargs: Any) -> EmulatedGraph:
        """Records the body on tensors without values."""
        device, recording, seconds = self.device, CaptureRecording(), 0.0
        if device.computes:
            with device.launch(recording) as scope:
                outputs = self.original(*args, **kwargs)
            seconds = device.clock.rates.seconds(scope.work)
            trace = LaunchTrace.of(outputs, scope)
        else:
            trace = self._trace("capture", args, kwargs)
        made = [leaf for leaf in flatten(trace.outputs) if isinstance(leaf, DeviceTensor)]
        kept = trace.kept if self.cached else trace.collective
        own = sum(t.numel() * t.dtype.itemsize for t in made) + kept + device.profile.graph_bytes
        piece = device.allocator.allocate("graphs", own, "a graph")
        recording.finish(made)
        return EmulatedGraph((args, kwargs), trace.outputs, recording, own, piece, seconds)

    def clear_cache(self) -> None:
        """Drops all graphs; bytes that are not given back stay charged."""
        device = self.device
        device.queue.wait()
        for graph in self.cache.values():
            back = int(graph.bytes * device.faults.returned)
            device.allocator.release("graphs", graph.bytes, graph.piece)
            if back < graph.bytes:
                device.allocator.allocate("not returned", graph.bytes - back)
        self.cache.clear()

    def clear_inputs(self) -> None:
        """Does nothing: inputs are the caller's own tensors."""


def wrap(
    device: EmulatedDevice,
    module: nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> nn.Module:
    """Replaces ``forward`` on the instance and adds ``clear_cache`` and ``clear_inputs``."""
    graphs = HpuGraphs(device, module.forward, max_graphs, not disable_tensor_cache)
    made: Any = module
    made.forward, made.clear_cache, made.clear_inputs = graphs.forward, graphs.clear_cache, graphs.clear_inputs
    return module
