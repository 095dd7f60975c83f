"""The passes of the bridge's compiler over a functional graph, as far as they decide what a card computes and copies.

Facts of the bridge 1.19.0 (docs/hpu-internals.md gives the source of each): operations are placed in a cluster or left
to eager execution; ``index_copy`` on a graph's input is put back in place under conditions; connected operations of
a cluster are one recipe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupport

from trencadis.backends.hpu.emulator.op_table import OpTable

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
