"""Ranks on a Ray cluster of two nodes on this machine: tokens, calls, nodes that are removed, what stays.

Needs Ray (the extra ``ray``); the cluster has some seven processes and 160 MB of shared memory.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.fakes import ranks as fake_ranks
from tests.fakes.ranks import full_step
from tests.links import clusters
from tests.links.clusters import ray
from tests.links.peers import FACTORY
from tests.parallel.test_same_tokens import BASE, answered, same, same_of_many
from trencadis import LLM
from trencadis.assets import demo_path
from trencadis.core import devices
from trencadis.core.engine.engine_builder import launcher_of
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.multiproc_executor import MultiprocExecutor, RankFailed
from trencadis.core.links.rank_placement import topology

pytestmark = pytest.mark.long

SOON = 6.0
BUSY = 24.0
"""Seconds more against hangs: ``remove_node`` itself waits for processes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with one CPU and what counts as a card; tests add a node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.getcwd())
        made = clusters.cluster(1, num_gpus=1)
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def node(cluster: Any) -> Iterator[Any]:
    made = clusters.add(cluster, 1, num_gpus=1)
    yield made
    if made in cluster.list_all_nodes():
        cluster.remove_node(made)


def config(**more: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu", tensor_parallel_size=2, threads=1, distributed_executor_backend="ray", allow_tp_over_nodes=True,
        **more,
    )  # fmt: skip


def group() -> MultiprocExecutor:
    made = config()
    group = MultiprocExecutor(made, FACTORY, launcher_of(made, topology(made, os.environ), os.environ))
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
    end = time.monotonic() + 60
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


def removed(cluster: Any, seed: int) -> float:
    """A group one of whose nodes is removed while Steps run; seconds until its caller knew."""
    node = clusters.add(cluster, 1)
    made = group()
    begun = 0.0
    with pytest.raises(RankFailed, match=r"rank 1 .* died"):
        for number in range(100_000):
            made.submit(full_step(number)).result()
            time.sleep(0.002)
            if number == 20 + seed:
                begun = time.monotonic()
                cluster.remove_node(node, allow_graceful=False)
    took = time.monotonic() - begun
    with pytest.raises(RankFailed):
        made.submit(full_step(1)).result()
    made.close()
    nothing_left()
    print(f"\nnode {seed + 1} removed: known after {took:.2f} s", flush=True)
    return took


def test_twenty_nodes_that_are_removed_end_their_groups(cluster: Any) -> None:
    taken = [removed(cluster, seed) for seed in range(int(os.environ.get("TRENCADIS_TEST_NODES", "20")))]
    print(f"\nnodes removed: {len(taken)}; known after {min(taken):.2f} to {max(taken):.2f} s")
    assert max(taken) < SOON + BUSY


def test_what_cannot_be_placed_is_refused_before_loading(cluster: Any) -> None:
    from trencadis.core.executor import ray_access_and_node_placement as ours

    ours.connect(os.environ)
    begun, made = time.monotonic(), config()
    with pytest.raises(StartupError, match=r"2 ranks need 2 CPU, and the Ray cluster has 1 free of"):
        launcher_of(made, topology(made, os.environ), os.environ)
    took = time.monotonic() - begun
    print(f"\nrefused after {took:.2f} s")
    assert took < 5
    nothing_left()


@pytest.mark.parametrize("shape", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_hundred_prompts_on_two_nodes(shape: str, node: Any) -> None:
    alone = LLM(str(demo_path()), **BASE)
    flags: dict[str, Any] = {shape: 2, "distributed_executor_backend": "ray", "allow_tp_over_nodes": True}
    llm = LLM(str(demo_path()), **flags, **BASE)
    try:
        print(f"\nRay, {shape} 2: {same_of_many(llm, cache(lambda seeds: answered(alone, seeds)))}")
    finally:
        llm.close()
        alone.close()
    nothing_left()


def test_cards_that_are_not_here_are_asked_of_the_cluster(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is named; each node has one card, whose twin computes."""
    monkeypatch.setattr(devices, "cards", lambda *requested: (1, "there is 1 here"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # Ray says it of the rank that is here
    alone = LLM(str(demo_path()), **BASE)
    flags: dict[str, Any] = {"device": "cuda", "policy": "twin", "warmup": "skip", "allow_tp_over_nodes": True}
    llm = LLM(str(demo_path()), tensor_parallel_size=2, **flags, **BASE)
    try:
        assert isinstance(llm.engine.executor, MultiprocExecutor) and llm.engine.executor.children[0].remote
        same(llm, range(4), lambda seeds: answered(alone, seeds))
    finally:
        llm.close()
        alone.close()
    nothing_left()
