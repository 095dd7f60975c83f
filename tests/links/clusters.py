"""Ray clusters of several nodes on this machine, which may be busy. Importing this skips a module where Ray is absent.

Ray's node ends itself where its agents do not tell their ports in 15 s; they are not waited for where ports are given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.traffic.server_process import free_port

for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "600000", "RAY_worker_register_timeout_seconds": "600",
    "RAY_enable_metrics_collection": "0",
}.items():  # fmt: skip
    os.environ.setdefault(_name, _value)  # Ray reads them when it is imported
ray: Any = pytest.importorskip("ray", reason="pip install 'trencadis[ray]'")

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def node(cpus: int, **more: Any) -> dict[str, Any]:
    """Arguments of a node with that many CPUs and 80 MB of shared memory."""
    return {"num_cpus": cpus, "object_store_memory": 80 << 20, **{name: free_port() for name in PORTS}, **more}


def tried(work: Callable[[], Any], times: int = 5) -> Any:
    """``work()``. Ray waits 30 s for a node, which a busy machine may not start so soon; then it is tried again.

    What a failed try has started is ended first: a head that is half there holds its port, at which the next try would
    meet it.
    """
    me = psutil.Process()
    while True:
        times -= 1
        before = set(me.children())
        try:
            return work()
        except Exception as error:
            end([child for child in me.children() if child not in before])
            if not times or "timed out during startup" not in str(error):
                raise


def end(processes: list[psutil.Process]) -> None:
    """Kills processes with all that they have started, and waits until they are gone."""
    found = [*processes]
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            found += one.children(recursive=True)
    for one in found:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(found, 10)


def add(to: Any, cpus: int, **more: Any) -> Any:
    """A new node of a cluster."""
    made = tried(lambda: to.add_node(**node(cpus, **more)))
    to.wait_for_nodes(300)
    return made


def cluster(cpus: int, *others: int, **head: Any) -> Any:
    """A head and other nodes, by their CPUs; it has no dashboard."""
    from ray.cluster_utils import Cluster

    made = tried(
        lambda: Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **node(cpus), **head})
    )
    try:
        for count in others:
            add(made, count)
    except BaseException:
        made.shutdown()
        raise
    return made
