"""``torch.compile`` as on the card: Dynamo and AOT autograd make a functional graph, the card runs its operations.

The passes over a functional graph are those of the bridge's compiler, as far as they decide what a card computes and
copies. Facts of the bridge 1.19.0 (docs/hpu-internals.md gives the source of each): operations are placed in a cluster
or left to eager execution; ``index_copy`` on a graph's input is put back in place under conditions; connected
operations of a cluster are one recipe.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupport
from torch.utils._python_dispatch import _disable_current_modes

from trencadis.backends.hpu.emulator import emulated_errors
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import OpTable
from trencadis.backends.hpu.emulator.device_tensor import DEVICE, DeviceTensor, TensorOwner, flatten, rebuild
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.launch_recording_and_replay import RegionRecords
from trencadis.backends.hpu.hccl_comm import HpuComm
from trencadis.backends.hpu.ops import HpuOps

aten = torch.ops.aten


@dataclass
class Lowered:
    """A graph as the card runs it.

    Args:
        recipes: (key, operations) of each partition.
        eager: operations left to eager execution: node name -> reason.
        copied: inputs that are rewritten as a whole: node name of the copy -> bytes.
    """

    graph: GraphModule
    recipes: list[tuple[str, int]]
    eager: dict[str, str]
    copied: dict[str, int] = field(default_factory=dict)


def lower(graph: GraphModule, table: OpTable) -> Lowered:
    """Places, reinplaces and partitions ``graph``, which is changed."""
    eager = place_nodes(graph, table)
    reinplace(graph, eager)
    copied = {n.name: _bytes(n.args[0]) for n in graph.graph.nodes if n.target is aten.copy_.default}
    return Lowered(graph, [(key(nodes), len(nodes)) for nodes in partitions(graph, eager)], eager, copied)


def place_nodes(graph: GraphModule, table: OpTable) -> dict[str, str]:
    """Returns the operations that no cluster takes: node name -> reason."""
    found = {}
    for node in calls(graph):
        why = table.eager(node.target, _dtypes(node), node.args)
        if why:
            found[node.name] = why
    return found


def reinplace(graph: GraphModule, eager: dict[str, str]) -> None:
    """Turns ``index_copy`` and its ``copy_`` into ``index_copy_`` where ``can_reinplace`` allows it."""
    for node in list(calls(graph)):
        if node.target is aten.index_copy.default and can_reinplace(node, eager):
            target: Any = node.args[0]
            copy = next(u for u in target.users if u.target is aten.copy_.default)
            node.target = aten.index_copy_.default
            copy.replace_all_uses_with(node)
            graph.graph.erase_node(copy)
    graph.recompile()


def can_reinplace(node: Node, eager: dict[str, str]) -> bool:
    """Returns True if a store can be done in place.

    Its target is no view, and has two users: the store and a ``copy_``. No eager operation reads the store's result.
    """
    target = node.args[0]
    assert isinstance(target, Node)
    users = list(target.users)
    written = len(users) == 2 and any(u.target is aten.copy_.default for u in users)
    return written and not is_view(target) and not any(u.name in eager for u in node.users)


def is_view(node: Node) -> bool:
    """Returns True if a node's result shares the memory of an argument."""
    return node.op == "call_function" and any(
        r.alias_info is not None for r in getattr(getattr(node.target, "_schema", None), "returns", ())
    )


def partitions(graph: GraphModule, eager: dict[str, str]) -> list[list[Node]]:
    """Returns the nodes of each recipe."""
    if not eager:
        nodes = calls(graph)
        return [nodes] if nodes else []

    class Clustered(OperatorSupport):
        def is_node_supported(self, submodules: Any, node: Node) -> bool:
            return node.op == "call_function" and node.name not in eager

    found = CapabilityBasedPartitioner(graph, Clustered(), allows_single_node_partition=True).propose_partitions()
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    return [sorted(part.nodes, key=lambda n: order[n]) for part in found]


def key(nodes: list[Node]) -> str:
    """Returns a digest of operations, shapes, types, constants and dependencies."""
    number = {node: i for i, node in enumerate(nodes)}
    outside: dict[Node, int] = {}

    def argument(leaf: Node) -> Any:
        if leaf in number:
            return f"%{number[leaf]}"
        at = outside.setdefault(leaf, len(outside))
        return f"in{at}:{_shape(leaf)}"

    rows = [(str(n.target), str(torch.fx.map_arg((n.args, n.kwargs), argument)), _shape(n)) for n in nodes]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def calls(graph: GraphModule) -> list[Node]:
    """Returns the operations of a graph, in order."""
    return [n for n in graph.graph.nodes if n.op == "call_function"]


def line_of(node: Node) -> str:
    """Returns the line of code that made a node."""
    lines = [t.strip() for t in str(node.meta.get("stack_trace", "")).splitlines() if t.strip().startswith("File ")]
    return lines[-1] if lines else "unknown"


def _shape(node: Node) -> Hashable:
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return (tuple(found.shape), str(found.dtype))
    return str(type(found))


def _dtypes(node: Node) -> list[torch.dtype]:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return [v.dtype for v in values if isinstance(v, torch.Tensor)]


def _bytes(node: Any) -> int:
    found = node.meta["val"]
    return int(found.numel() * found.element_size())


KEPT = (HpuOps, HpuComm, TensorOwner, torch.device, torch.dtype, str, int, float)
"""Types of objects without tensors of their own, which the compiler gets unchanged."""

SKIPPED = ("ops", "comm", "backend", "config")


class HostTwins:
    """Maps host tensors that the compiler traces to the device tensors that they stand for, for one call."""

    def __init__(self) -> None:
        self.tensors: dict[int, DeviceTensor] = {}
        self.storages: dict[int, DeviceTensor] = {}
        self._memo: dict[int, Any] = {}
        self._alive: list[Tensor] = []

    def of(self, value: Any) -> Any:
        """Returns ``value`` with host tensors in place of device tensors, in tuples, functions and objects of any
        depth.
        """
        if isinstance(value, DeviceTensor):
            return self.host(value)
        if isinstance(value, tuple):
            made = [self.of(item) for item in value]
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if isinstance(value, list):
            return [self.of(item) for item in value]
        if isinstance(value, partial):
            return partial(self.of(value.func), *value.args, **value.keywords)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, FunctionType):
            return self._function(value)
        return self._object(value)

    def host(self, tensor: DeviceTensor) -> Tensor:
        """Returns the host tensor inside ``tensor``; one without values gets unwritten memory, for the compiler's
        guards.
        """
        found = tensor.held
        if found.is_meta and tensor.owner.computes:
            known = self._memo.get(id(tensor))
            if known is not None:
                return known  # type: ignore[no-any-return]
            found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            self._memo[id(tensor)] = found
        self.pair(found, tensor)
        return found

    def pair(self, host: Tensor, tensor: DeviceTensor) -> None:
        """Records that ``host`` stands for ``tensor``."""
        self.tensors[id(host)] = tensor
        self.storages.setdefault(host.untyped_storage()._cdata, tensor)
        self._alive.append(host)

    def back(self, host: Tensor) -> DeviceTensor | None:
        """Returns the device tensor of ``host``, or a view of the device tensor whose memory ``host`` is a view of;
        else None.
        """
        found = self.tensors.get(id(host))
        if found is not None:
            return found
        base = self.storages.get(host.untyped_storage()._cdata)
        if base is None:
            return None
        made = DeviceTensor(host, base.store, base.owner, is_view=True)
        if base.held.is_meta:
            view = torch.empty(0, dtype=host.dtype, device="meta")
            made.held = view.set_(base.store.meta_storage(), host.storage_offset(), host.size(), host.stride())
        return made

    def _function(self, value: FunctionType) -> Any:
        cells = value.__closure__
        if not cells:
            return value
        made = tuple(CellType(self.of(cell.cell_contents)) for cell in cells)
        return FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, made)

    def _object(self, value: Any) -> Any:
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        if not names or isinstance(value, (*KEPT, type)) or type(value).__module__.startswith("torch"):
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        made = self._memo[id(value)] = copy.copy(value)
        for name in names:
            if name not in SKIPPED:
                object.__setattr__(made, name, self.of(getattr(value, name)))
        return made


Twin = Callable[..., Any]


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
        self._records = RegionRecords()
        self._numbers = itertools.count()
        self._backend = aot_autograd(
            fw_compiler=self._lower,
            inference_compiler=self._lower,
            decompositions=decompositions(),
            keep_inference_input_mutations=True,
        )

    def compile(self, function: Callable[..., Any], fullgraph: bool = True) -> Callable[..., Any]:
        """Returns ``function`` of device tensors, compiled for each set of shapes that it is called with."""
        if not self.device.computes:
            number = next(self._numbers)  # not its id, which another function may have once this one is gone
            return lambda *args: self._run_without_values(number, function, args)
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

    def _run_without_values(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a region without values, as one recipe; one that has run on arguments of these shapes is not run again:
        its recorded figures are added.
        """
        if self.device.scope is None:
            with self.device.launch():
                return self._run_without_values(number, function, args)
        scope, taken = self.device.scope, _tensors(args)
        self.device.clock.run_flavour((number, tuple(t.storage_offset() for t in taken)))
        self._charge_strided(taken)
        scope.cut()
        scope.region = True
        out = self._records.run(scope, function, self.device.layer, args)
        scope.region = False
        scope.cut()
        scope.live.hold(_own_bytes(out))
        given, name = set(map(id, taken)), getattr(args[0], "__qualname__", type(args[0]).__name__)
        for leaf in _tensors(out):
            if leaf.aliases and id(leaf) not in given:
                self.device.clock.count_event("eager_view", f"{tuple(leaf.shape)} of {name}")
        return out

    def _charge_strided(self, taken: list[DeviceTensor]) -> None:
        """Charges the whole storage of each input whose elements are not contiguous."""
        device = self.device
        for t in taken:
            if t.is_view and not t.is_contiguous():
                device.clock.count_event("strided_input", f"{tuple(t.shape)} of {t.store.bytes} bytes")
                device.clock.add_seconds(2 * t.store.bytes / device.profile.bandwidth)

    def _lower(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        """Lowers a functional graph, as the backend of ``torch.compile``; returns the function that runs it."""
        lowered = lower(graph, self.device.table)
        self.device.graphs.append(lowered)
        check = self.device.faults.check_graph()
        for key, ops in lowered.recipes:
            self.device.clock.run_recipe(key, ops)

        def call(args: list[Any]) -> Any:
            check()
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
                    scope.live.hold(_own_bytes([values.get(leaf) for leaf in node.args[0] if isinstance(leaf, Node)]))
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
        self._charge_strided(taken)

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
        raise emulated_errors.host_mixed(f"{node.name} ({line_of(next(iter(node.users)))})")
    return tensor


def _tensors(tree: object) -> list[DeviceTensor]:
    """Returns the device tensors in nested tuples and lists."""
    return [leaf for leaf in flatten(tree) if isinstance(leaf, DeviceTensor)]


def _own_bytes(tree: object) -> int:
    """Returns the bytes of the device tensors in ``tree`` that have memory of their own."""
    return sum(t.numel() * t.dtype.itemsize for t in _tensors(tree) if not t.is_view)


def _lists(args: Any) -> Any:
    """Replaces the graph's own list types by plain lists."""
    return [list(a) if isinstance(a, list) else a for a in args]
