"""Access to the Ray cluster: connection, resources, and the assignment of ranks to nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from trencadis.core import envs
from trencadis.core.errors import StartupError
from trencadis.core.executor import cluster_access

NODE = "ray.io/node-id"
"""A label that every node has."""

NEEDED = (
    "--distributed-executor-backend ray, or --data-parallel-backend ray, needs Ray, of the cluster's version: "
    "pip install 'trencadis[ray]'"
)

OWN_NODE = "TRENCADIS_RAY_NODE"

PLACEMENT_TIMEOUT = 5.0
"""Seconds in which Ray must place a group."""


@dataclass(frozen=True)
class ClusterNode:
    """A live node: ``total`` and ``free`` count one resource; ``here`` is True for this process's node."""

    id: str
    address: str
    total: int
    free: int
    here: bool = False


def connect(environ: Mapping[str, str]) -> ModuleType:
    """Returns the ``ray`` module, connected to a running cluster.

    Raises:
        StartupError: Ray is not installed, no cluster answers, or this process must not or cannot join it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if find_spec("ray") is None:
        raise StartupError(NEEDED)
    address = envs.get("RAY_ADDRESS", environ) or "auto"
    cluster_access.check_reachable(address)
    answer = cluster_access.probe_access(address, os.environ)  # runs while this process imports Ray
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise StartupError(f"{NEEDED} ({error})") from None
    cluster_access.check_token(answer(), os.environ)
    try:
        ray.init(
            address=address, namespace="trencadis", log_to_driver=False, configure_logging=False,
            ignore_reinit_error=True,
        )  # fmt: skip
    except ConnectionError:
        where = "runs on this machine" if address == "auto" else f"answers at {address}"
        raise StartupError(f"no Ray cluster {where}: {cluster_access.START}") from None
    except Exception as error:  # Ray raises many types
        said = " ".join(str(error).split())
        if "ersion" in said:
            raise StartupError(
                f"this Ray ({ray.__version__}) is not the cluster's: install its version ({said[:200]})"
            ) from None
        raise StartupError(f"the Ray cluster at {address} cannot be joined: {said[:300]}") from None
    cluster_access.check_not_open(str(ray.get_runtime_context().gcs_address))
    return ray


def nodes_of(ray: ModuleType, resource: str) -> list[ClusterNode]:
    """Returns the live nodes, this one first.

    An engine that Ray placed on a node gets its id from a variable: with several nodes on a machine, Ray would name
    another.
    """
    mine = envs.get(OWN_NODE, os.environ) or ray.get_runtime_context().get_node_id()
    free = import_module("ray._private.state").available_resources_per_node()
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            id = node["NodeID"]
            total, left = node["Resources"].get(resource, 0), free.get(id, {}).get(resource, 0)
            found.append(ClusterNode(id, node["NodeManagerAddress"], int(total), int(left), id == mine))
    return sorted(found, key=lambda n: (not n.here, n.id))


def assign_nodes(
    nodes: Sequence[ClusterNode], groups: int, size: int, resource: str, spread: bool
) -> list[ClusterNode]:
    """Assigns a node to each of ``groups * size`` ranks; the first is on this node.

    The ``size`` ranks of a group are on one node, unless ``spread`` is True.

    Raises:
        StartupError: there are not enough free resources; the message has both counts.
    """
    left = {node.id: node.free for node in nodes}
    world = groups * size
    has = ", ".join(f"{n.address} {n.free} free of {n.total}" for n in nodes)
    want = f"{world} ranks need {world} {resource}"
    if not nodes or not nodes[0].here or not nodes[0].free:
        raise StartupError(
            f"{want}, the first of them on the server's own node, and it has none free ({has}): start the server on a "
            f"node with {resource}"
        )
    if sum(left.values()) < world:
        raise StartupError(
            f"{want}, and the Ray cluster has {sum(left.values())} free of {sum(n.total for n in nodes)} ({has})"
        )
    found: list[ClusterNode] = []
    for _ in range(groups):
        able = nodes if found else nodes[:1]
        taken = next(([node] * size for node in able if left[node.id] >= size), None)
        if taken is None and spread:
            taken = [node for node in nodes for _ in range(left[node.id])][:size]
            taken = taken if len(taken) == size else None
        if taken is None:
            raise StartupError(
                f"{want}, {size} of them on one node for each group of --tensor-parallel-size, and the nodes have: "
                f"{has}; --allow-tp-over-nodes spreads a group over nodes, which is slow"
            )
        for node in taken:
            left[node.id] -= 1
        found += taken
    return found


def choose_lead_node(nodes: Sequence[ClusterNode], groups: int, size: int, resource: str, spread: bool) -> ClusterNode:
    """Returns the node for the first rank of an engine: this one, or the first that has enough resources.

    Raises:
        StartupError: no node is suitable; the message has both counts.
    """
    refused: StartupError | None = None
    for node in (n for n in nodes if n.free):
        others = (replace(other, here=False) for other in nodes if other.id != node.id)
        try:
            assign_nodes([replace(node, here=True), *others], groups, size, resource, spread)
        except StartupError as error:
            refused = refused or error
        else:
            return node
    if refused is not None:
        raise refused
    has = ", ".join(f"{n.address} {n.free} free of {n.total}" for n in nodes)
    raise StartupError(
        f"{groups * size} ranks need {groups * size} {resource}, and the Ray cluster has none free ({has})"
    )


def assign_engine_nodes(nodes: Sequence[ClusterNode], engines: int, ranks: int, resource: str) -> list[ClusterNode]:
    """Returns a node for each of ``engines``, which holds all its ``ranks``; nodes are filled one after another.

    Raises:
        StartupError: there are not enough free resources; the message has both counts.
    """
    found = [node for node in nodes for _ in range(node.free // ranks)][:engines]
    if len(found) < engines:
        has = ", ".join(f"{n.address} {n.free} free of {n.total}" for n in nodes)
        raise StartupError(
            f"{engines} engines need {ranks} {resource} each on one node, and the Ray cluster has room for "
            f"{len(found)} ({has})"
        )
    return found


def create_engine_group(ray: ModuleType, engines: int, ranks: int, resource: str) -> Any:
    """Creates a placement group with a bundle per engine. If a node is lost, Ray recreates its bundle elsewhere.

    Raises:
        StartupError: Ray does not place it in ``PLACEMENT_TIMEOUT`` seconds.
    """
    groups = import_module("ray.util.placement_group")
    made = groups.placement_group([{resource: ranks} for _ in range(engines)], strategy="PACK")
    try:
        ray.get(made.ready(), timeout=PLACEMENT_TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        remove_group(made)
        raise StartupError(
            f"Ray did not place {engines} engines of {ranks} {resource} in {PLACEMENT_TIMEOUT:g} s: `ray status` shows "
            f"who holds "
            "what"
        ) from None
    return made


def create_actor_in_bundle(ray: ModuleType, actor: type, group: Any, bundle: int, resource: str, count: int) -> Any:
    """Creates an actor that takes ``count`` of a bundle's resource."""
    strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    takes = {"GPU": {"num_gpus": count, "num_cpus": 0}, "CPU": {"num_cpus": count}}.get(
        resource, {"resources": {resource: count}, "num_cpus": 0}
    )
    return ray.remote(actor).options(scheduling_strategy=strategy, max_restarts=0, **takes).remote()


def create_actor_on_node(ray: ModuleType, actor: type, node: str) -> Any:
    """Creates an actor on a given node that takes no resources."""
    strategies = import_module("ray.util.scheduling_strategies")
    strategy = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(actor).options(scheduling_strategy=strategy, max_restarts=0, num_cpus=0).remote()


def create_rank_group(ray: ModuleType, nodes: Sequence[ClusterNode], resource: str) -> Any:
    """Creates a placement group with a bundle for each rank on its assigned node.

    Raises:
        StartupError: Ray does not place it in ``PLACEMENT_TIMEOUT`` seconds.
    """
    groups = import_module("ray.util.placement_group")
    made = groups.placement_group(
        [{resource: 1} for _ in nodes], strategy="PACK", bundle_label_selector=[{NODE: node.id} for node in nodes]
    )
    try:
        ray.get(made.ready(), timeout=PLACEMENT_TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        groups.remove_placement_group(made)
        raise StartupError(
            f"Ray did not place {len(nodes)} ranks of 1 {resource} in {PLACEMENT_TIMEOUT:g} s: `ray status` shows who "
            f"holds what"
        ) from None
    return made


def remove_group(group: Any) -> None:
    """Removes a placement group together with its actors."""
    with suppress(Exception):
        import_module("ray.util.placement_group").remove_placement_group(group)


def await_free_nodes(ray: ModuleType, resource: str, world: int) -> list[ClusterNode]:
    """Returns the nodes once enough of the resource is free, or after ``PLACEMENT_TIMEOUT`` seconds."""
    end = time.monotonic() + PLACEMENT_TIMEOUT - 1
    while True:
        nodes = nodes_of(ray, resource)
        if sum(n.free for n in nodes) >= world or time.monotonic() > end:
            return nodes
        time.sleep(0.2)
