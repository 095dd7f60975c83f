"""Ranks on a Ray cluster of two nodes on this machine: tokens, calls, nodes that are removed, what stays.

Needs Ray (the extra ``ray``); the cluster has some seven processes and 160 MB of shared memory.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import ranks as fake_ranks
from tests.fakes.ranks import full_step
from tests.links.peers import FACTORY
from tests.oracles.transformers_model import assert_same
from tests.parallel.test_same_tokens import BASE, answered
from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.launchers import launcher_of
from trencadis.core.executor.mp import Multiproc
from trencadis.core.executor.trouble import RankFailed
from trencadis.core.links.topology import topology

ray: Any = pytest.importorskip("ray", reason="pip install 'trencadis[ray]'")
pytestmark = pytest.mark.long

MEMORY = 80 << 20
SOON = 6.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with one CPU; tests add a node."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.getcwd())
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": MEMORY})
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def node(cluster: Any) -> Iterator[Any]:
    made = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    cluster.wait_for_nodes()
    yield made
    if made in cluster.list_all_nodes():
        cluster.remove_node(made)


def config(**more: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu", tensor_parallel_size=2, threads=1, distributed_executor_backend="ray", allow_tp_over_nodes=True,
        **more,
    )  # fmt: skip


def group() -> Multiproc:
    made = config()
    group = Multiproc(made, FACTORY, launcher_of(made, topology(made, os.environ), os.environ))
    group.start(lambda place: fake_ranks.make(made, place))
    return group


def left() -> Counter[str]:
    """Actors that are alive, and placement groups that are not removed."""
    from ray._private.state import actors  # ray.util.state needs a dashboard
    from ray.util.placement_group import placement_group_table

    found = Counter(a["State"] for a in actors().values() if a["State"] != "DEAD")
    found.update(t["state"] for t in placement_group_table().values() if t["state"] != "REMOVED")
    return found


def nothing_left() -> None:
    end = time.monotonic() + 20
    while left():
        assert time.monotonic() < end, left()
        time.sleep(0.3)


def test_no_step_touches_ray(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of actors, gets, waits and puts are counted from the start on."""
    calls: Counter[str] = Counter()
    made = group()
    real = ray.actor.ActorMethod._remote

    def remote(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls["remote"] += 1
        return real(self, *args, **kwargs)

    monkeypatch.setattr(ray.actor.ActorMethod, "_remote", remote)
    for name in ("get", "wait", "put"):
        monkeypatch.setattr(ray, name, lambda *a, name=name, **k: calls.update([name]))
    assert [made.submit(full_step(n)).result().number for n in range(200)] == list(range(200))
    made.warm().result()
    assert not calls
    monkeypatch.undo()
    made.close()
    nothing_left()


def test_a_node_that_is_removed_ends_the_group(cluster: Any, node: Any) -> None:
    made = group()
    begun = 0.0
    with pytest.raises(RankFailed, match=r"rank 1 .* died"):
        for number in range(100_000):
            made.submit(full_step(number)).result()
            time.sleep(0.002)
            if number == 20:
                cluster.remove_node(node, allow_graceful=False)
                begun = time.monotonic()
    took = time.monotonic() - begun
    print(f"\nnode removed: known after {took:.2f} s")
    made.close()
    nothing_left()
    assert took < SOON


def test_what_cannot_be_placed_is_refused_before_loading(cluster: Any) -> None:
    from trencadis.core.executor.on_ray import cluster as ours

    ours.connect(os.environ)
    begun, made = time.monotonic(), config()
    with pytest.raises(StartupError, match=r"2 ranks need 2 CPU, and the Ray cluster has 1 free of 1"):
        launcher_of(made, topology(made, os.environ), os.environ)
    took = time.monotonic() - begun
    print(f"\nrefused after {took:.2f} s")
    assert took < 5
    nothing_left()


def test_two_hundred_answers_on_two_nodes(node: Any, tmp_path: Path) -> None:
    alone = LLM(str(demo_path()), **BASE)
    wanted, _ = answered(alone, range(50))
    alone.close()
    llm = LLM(
        str(demo_path()), tensor_parallel_size=2, distributed_executor_backend="ray", allow_tp_over_nodes=True, **BASE
    )
    found, _ = answered(llm, range(50))
    llm.close()
    assert_same([(a.tokens, b) for a, b in zip(found, wanted, strict=True)])
    nothing_left()
