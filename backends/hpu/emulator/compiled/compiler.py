"""``torch.compile`` as on the card: Dynamo and AOT autograd make a functional graph, the card runs its operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from trencadis.backends.hpu.emulator import refusals
from trencadis.backends.hpu.emulator.compiled.graph_passes import Lowered, is_view, line_of, lower
from trencadis.backends.hpu.emulator.compiled.host_twins import HostTwins
from trencadis.backends.hpu.emulator.device_tensor import DEVICE, DeviceTensor, rebuild
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice

aten = torch.ops.aten
SPLIT: list[Any] = [
    aten.addcdiv, aten.addcmul, aten.arange.default, aten.arange.start, aten.baddbmm, aten.detach, aten.fill.Scalar,
    aten.fill.Tensor, aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros, aten.ones, aten.ones_like,
    aten.rsub.Tensor, aten.stack, aten.t, aten.unbind.int, aten.zeros, aten.zeros_like,
]  # fmt: skip
"""Operations that the bridge has decomposed into others before it sees a graph, as far as inference uses them."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns the bridge's decompositions of operations; a sort is a topk of all elements."""

    def sort(a: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(a, a.size(dim) if a.dim() else 1, dim, descending)
        return values, indices

    def full_like(a: Tensor, value: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.full(a.shape, value, dtype=dtype or a.dtype, device=device or a.device)

    found: dict[Any, Callable[..., Any]] = dict(get_decompositions(SPLIT))
    found[aten.sort.default], found[aten.full_like.default] = sort, full_like
    return found


class Compiler:
    """The compiler of one card."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._twins = HostTwins()
        self._backend = aot_autograd(
            fw_compiler=self._lower,
            inference_compiler=self._lower,
            decompositions=decompositions(),
            keep_inference_input_mutations=True,
        )

    def compile(self, function: Callable[..., Any], fullgraph: bool = True) -> Callable[..., Any]:
        """Returns ``function`` of device tensors, compiled for each set of shapes that it is called with."""
        if not self.device.computes:
            return lambda *args: self._run_without_values(function, args)
        compiled = torch.compile(function, backend=self._backend, fullgraph=fullgraph, dynamic=False)

        def run(*args: Any) -> Any:
            if self.device.scope is None:
                with self.device.launch():
                    return self._run(compiled, args)
            return self._run(compiled, args)

        return run

    def _run(self, compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        before, self._twins = self._twins, HostTwins()
        twins = self._twins
        try:
            with _disable_current_modes(), torch.no_grad():
                out = compiled(*twins.of(args))
            return rebuild(out, lambda leaf: twins.back(leaf) if isinstance(leaf, Tensor) else leaf)
        finally:
            self._twins = before

    def _run_without_values(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a region without values, as one recipe; equal layers run only once."""
        if self.device.scope is None:
            with self.device.launch():
                return self._run_without_values(function, args)
        scope = self.device.scope
        scope.cut()
        scope.region = True
        out = self.device.layer(*args)
        scope.region = False
        scope.cut()
        return out

    def _lower(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        """Lowers a functional graph, as the backend of ``torch.compile``; returns the function that runs it."""
        lowered = lower(graph, self.device.table)
        self.device.graphs.append(lowered)
        for key, ops in lowered.recipes:
            self.device.clock.run_recipe(key, ops)

        def call(args: list[Any]) -> Any:
            taken = list(args)
            args.clear()
            return self._call(lowered, taken)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _call(self, lowered: Lowered, args: list[Any]) -> Any:
        """Runs a graph once, node by node on device tensors, checking the rules of each operation."""
        twins, scope = self._twins, self.device.scope
        assert scope is not None
        values: dict[Node, Any] = {}
        self._enter(lowered, args)
        given = iter(args)
        before, scope.silent = scope.silent, True
        try:
            for node in lowered.graph.graph.nodes:
                if node.op == "placeholder":
                    host = next(given)
                    values[node] = _require_device_tensor(twins.back(host), node) if isinstance(host, Tensor) else host
                elif node.op == "get_attr":
                    values[node] = _require_device_tensor(None, node)
                elif node.op == "output":
                    return rebuild(list(node.args[0]), lambda leaf: self._read_value(values, leaf))
                else:
                    values[node] = self._node(lowered, node, values)
        finally:
            scope.silent = before
        raise AssertionError("a graph ends with its output")

    def _enter(self, lowered: Lowered, args: list[Any]) -> None:
        """Charges what inputs that are views cost: an executable for a new combination of offsets, for which the card's
        pipeline is drained, and the whole storage of one whose elements are not contiguous.
        """
        device = self.device
        taken = [t for t in (self._twins.back(a) for a in args if isinstance(a, Tensor)) if t is not None]
        if device.clock.run_flavour((id(lowered), tuple(t.storage_offset() for t in taken))):
            device.queue.wait()
        for t in taken:
            if t.is_view and not t.is_contiguous():
                device.clock.count_event("strided_input", f"{tuple(t.shape)} of {t.store.bytes} bytes")
                device.clock.add_seconds(2 * t.store.bytes / device.profile.bandwidth)

    def _node(self, lowered: Lowered, node: Node, values: dict[Node, Any]) -> Any:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": DEVICE}
        clock, scope = self.device.clock, self.device.scope
        if node.name in lowered.copied:
            clock.charge_copy(lowered.copied[node.name])
        if node.name in lowered.eager:
            clock.count_event("eager_fallback", f"{node.target}: {lowered.eager[node.name]}: {line_of(node)}")
        assert scope is not None
        scope.silent = node.name not in lowered.eager
        if isinstance(node.target, OpOverload):
            out = self.device.dispatch(node.target, tuple(_lists(args)), dict(kwargs))
        else:
            assert callable(node.target)
            out = node.target(*args, **kwargs)
        scope.silent = True
        for used in node.all_input_nodes:
            if list(used.users)[-1] is node and used.op == "call_function":
                del values[used]
        return out

    def _read_value(self, values: dict[Node, Any], leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        found = values[leaf]
        if is_view(leaf):  # the bridge hands out the base and takes the view eagerly
            self.device.clock.count_event("eager_view", f"{leaf.target}: {line_of(leaf)}")
        return self._twins.host(found) if isinstance(found, DeviceTensor) else found


def _require_device_tensor(tensor: DeviceTensor | None, node: Node) -> DeviceTensor:
    """Returns the device tensor that enters a graph; raises Refused for a host tensor."""
    if tensor is None:
        raise refusals.host_mixed(f"{node.name} ({line_of(next(iter(node.users)))})")
    return tensor


def _lists(args: Any) -> Any:
    """Replaces the graph's own list types by plain lists."""
    return [list(a) if isinstance(a, list) else a for a in args]
