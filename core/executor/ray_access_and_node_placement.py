"""A cluster of Ray: whether it accepts this process, its nodes, and the placement of ranks and engines on them.

Whether it accepts this process, or any client, is found by a separate process, which makes the connection: with a
rejected token, Ray retries for most of a minute and then reports that there is no cluster, and it aborts a process that
has no token.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from trencadis.core import envs
from trencadis.core.errors import StartupError

START = "`ray start --head` starts one, and RAY_ADDRESS=host:port names another"

PROBE = 3.0
"""Seconds in which the cluster's port must accept a connection."""

PATIENCE = 30.0
"""Seconds in which the cluster must accept or reject a token."""

LET_IN, REFUSED, NO_TOKEN = 0, 3, 4
"""Exit codes of the probe process; any other: the probe failed."""

UNKNOWN = -1

AUTH = "RAY_AUTH_"
"""Prefix of the environment variables about tokens."""

ASK = f"""
import sys
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
address = canonicalize_bootstrap_address_or_die(sys.argv[1])
print(address, flush=True)
try:
    ensure_token_if_auth_enabled(create_token_if_missing=False)
except AuthenticationError:
    sys.exit({NO_TOKEN})
try:
    GcsClient(address=address)
except AuthenticationError:
    sys.exit({REFUSED})
"""


@dataclass(frozen=True)
class ClusterAccess:
    """A cluster's answer to an access probe.

    Args:
        address: the cluster's address; empty: unknown.
        said: LET_IN, REFUSED, NO_TOKEN or UNKNOWN.
    """

    address: str
    said: int


def probe_access(address: str, environ: Mapping[str, str]) -> Callable[[], ClusterAccess]:
    """Starts a probe in a child process; returns a function that waits for its answer.

    Args:
        address: ``host:port``, or ``auto``.
        environ: the environment of the probe, which may hold a token.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", ASK, address], env=dict(environ), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip

    def answer() -> ClusterAccess:
        with process:
            try:
                found, _ = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                return ClusterAccess("", UNKNOWN)
        said = process.returncode if process.returncode in (LET_IN, REFUSED, NO_TOKEN) else UNKNOWN
        return ClusterAccess(found.strip(), said)

    return answer


def check_token(answer: ClusterAccess, environ: Mapping[str, str]) -> None:
    """Raises StartupError if the cluster does not accept this process."""
    if answer.said == NO_TOKEN:
        raise StartupError(
            "RAY_AUTH_MODE=token and there is no token: set RAY_AUTH_TOKEN_PATH=FILE or RAY_AUTH_TOKEN to that of the "
            "cluster's nodes"
        )
    if answer.said == REFUSED and (envs.get("RAY_AUTH_MODE", environ) or "").lower() == "token":
        raise StartupError(
            f"the Ray cluster at {answer.address} asks for another token than this process shows: set "
            "RAY_AUTH_TOKEN_PATH=FILE or RAY_AUTH_TOKEN to that of its nodes"
        )
    if answer.said == REFUSED:
        raise StartupError(
            f"the Ray cluster at {answer.address} asks for a token, and this process shows none: set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH=FILE or RAY_AUTH_TOKEN to that of its nodes"
        )


def check_not_open(address: str) -> None:
    """Raises StartupError for a cluster on a public address that runs code of any client, with or without a token."""
    if is_public(address) and accepts_any_client(address):
        raise StartupError(
            f"the Ray cluster at {address} has a public address and asks for no token: whoever reaches it runs code "
            "there: start it with RAY_AUTH_MODE=token (`ray get-auth-token --generate`), and this server too"
        )


def accepts_any_client(address: str) -> bool:
    """True if the cluster accepts clients without a token, or if that cannot be determined."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(AUTH)}
    return probe_access(address, bare)().said != REFUSED


def is_public(address: str) -> bool:
    """Returns True if ``host:port`` has a globally routable address; host names are resolved."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        return any(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_global for *_, where in found)
    except (OSError, ValueError):
        return False


def check_reachable(address: str) -> None:
    """Raises StartupError if nothing answers at ``address``; Ray itself would retry for a minute."""
    host, _, port = address.rpartition(":")
    if address in ("auto", "local"):
        return
    if not host or "/" in address or not port.isdecimal():
        raise StartupError(f"RAY_ADDRESS={address[:100]} is no host:port of a cluster's head, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise StartupError(f"no Ray cluster answers at {address} ({why}): {START}") from None


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
    check_reachable(address)
    answer = probe_access(address, os.environ)  # runs while this process imports Ray
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise StartupError(f"{NEEDED} ({error})") from None
    check_token(answer(), os.environ)
    try:
        ray.init(
            address=address, namespace="trencadis", log_to_driver=False, configure_logging=False,
            ignore_reinit_error=True,
        )  # fmt: skip
    except ConnectionError:
        where = "runs on this machine" if address == "auto" else f"answers at {address}"
        raise StartupError(f"no Ray cluster {where}: {START}") from None
    except Exception as error:  # Ray raises many types
        said = " ".join(str(error).split())
        if "ersion" in said:
            raise StartupError(
                f"this Ray ({ray.__version__}) is not the cluster's: install its version ({said[:200]})"
            ) from None
        raise StartupError(f"the Ray cluster at {address} cannot be joined: {said[:300]}") from None
    check_not_open(str(ray.get_runtime_context().gcs_address))
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
    _await_placement(ray, made, f"{engines} engines of {ranks} {resource}")
    return made


def _await_placement(ray: ModuleType, group: Any, what: str) -> None:
    """Waits until Ray has placed ``group``; raises StartupError if that takes too long."""
    try:
        ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        remove_group(group)
        raise StartupError(
            f"Ray did not place {what} in {PLACEMENT_TIMEOUT:g} s: `ray status` shows who holds what"
        ) from None


def create_actor_in_bundle(ray: ModuleType, actor: type, group: object, bundle: int, resource: str, count: int) -> Any:
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
    _await_placement(ray, made, f"{len(nodes)} ranks of 1 {resource}")
    return made


def remove_group(group: object) -> None:
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
