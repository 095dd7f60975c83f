"""Engines of one server as actors of a Ray cluster of three nodes on this machine, the server's without a CPU.

Needs Ray (the extra ``ray``); the cluster has some ten processes and 240 MB of shared memory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.test_live import TEXTS, body, said
from tests.links import clusters
from tests.links.clusters import ray
from tests.links.test_ray import nothing_left
from tests.traffic.server_process import RunningServer, server

pytestmark = pytest.mark.long

FLAGS = (
    "--device", "cpu", "--max-num-seqs", "8", "--max-model-len", "512", "--kv-cache-memory-bytes", "32MiB",
    "--threads", "1",
)  # fmt: skip
PLACED = ("--data-parallel-size", "2", "--data-parallel-backend", "ray")


@pytest.fixture
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        made = clusters.cluster(0, 1, 1)
        try:
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def below(root: int) -> Iterator[tuple[int, str]]:
    """Processes that ``root`` has started, and those have: numbers and command lines."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for number in parents:
        above = number
        while above in parents and above != root:
            above = parents[above]
        if above == root and number != root:
            try:
                yield number, Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue


def engines() -> list[int]:
    return [number for number, line in below(os.getpid()) if "trencadis.core.process.engine_process" in line]


def ask(running: RunningServer, text: str, rank: int = -1) -> Any:
    headers = {"X-data-parallel-rank": str(rank)} if rank >= 0 else {}
    return running.http.post("/v1/chat/completions", json=body(text, max_tokens=12), headers=headers)


def test_engines_on_other_nodes_answer_as_one_here_and_are_started_again_when_they_die(
    cluster: Any, tmp_path: Path
) -> None:
    texts = TEXTS[:6]
    with server(tmp_path, *FLAGS, seconds=400) as running:
        expected = [said(ask(running, text)) for text in texts]
    with server(tmp_path, *FLAGS, *PLACED, seconds=600, PYTHONPATH=os.environ["PYTHONPATH"]) as running:
        assert len(engines()) == 2 and not running.engine_pids(), "an engine is here"
        for rank in (0, 1):
            assert [said(ask(running, text, rank)) for text in texts] == expected
        os.kill(engines()[0], signal.SIGKILL)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: ask(running, text), texts * 2))
        good = [(said(a), b) for a, b in zip(found, expected * 2, strict=True) if a.status_code == 200]
        assert {a.status_code for a in found} <= {200, 503} and all(a == b for a, b in good)
        end = time.monotonic() + 300
        while len(engines()) < 2 or any(ask(running, texts[0], rank).status_code != 200 for rank in (0, 1)):
            assert time.monotonic() < end, running.text()[-2000:]
            time.sleep(1.0)
        print(f"\nengine killed: {len(good)} of {len(found)} answered, both serve again")
        assert len(good) >= len(found) // 2
    nothing_runs()
    ray.init(address=cluster.address, log_to_driver=False)
    nothing_left()


LED = ("-tp", "2", "--allow-tp-over-nodes", "--distributed-executor-backend", "ray")


def test_an_engine_on_two_nodes_answers_a_server_without_a_card_and_comes_again(cluster: Any, tmp_path: Path) -> None:
    """The engine is on rank 0's node; once that is removed, its successor is on another one."""
    texts = TEXTS[:6]
    with server(tmp_path, *FLAGS, seconds=400) as running:
        expected = [said(ask(running, text)) for text in texts]
    with server(tmp_path, *FLAGS, *LED, seconds=600, PYTHONPATH=os.environ["PYTHONPATH"]) as running:
        assert len(engines()) == 1 and not running.engine_pids(), "the engine is here"
        assert [said(ask(running, text)) for text in texts] == expected
        first = engines()
        home = next(n for n in sorted(cluster.worker_nodes, key=lambda n: n.node_id) if below_node(n, first[0]))
        begun = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, running, text) for text in texts]
            cluster.remove_node(home, allow_graceful=False)
            codes = {a.result().status_code for a in answers}
        print(f"\nthe engine's node removed: open requests ended after {time.monotonic() - begun:.1f} s with {codes}")
        assert codes <= {200, 503}
        clusters.add(cluster, 1)
        end = time.monotonic() + 400
        while not engines() or engines() == first or ask(running, texts[0]).status_code != 200:
            assert time.monotonic() < end, running.text()[-2000:]
            time.sleep(1.0)
        assert [said(ask(running, text)) for text in texts] == expected
    nothing_runs()
    ray.init(address=cluster.address, log_to_driver=False)
    nothing_left()


def below_node(node: Any, pid: int) -> bool:
    """Whether a process was started by a node's raylet."""
    (raylet,) = node.all_processes["raylet"]
    return any(number == pid for number, _ in below(raylet.process.pid))


def nothing_runs() -> None:
    end = time.monotonic() + 60
    while engines():
        assert time.monotonic() < end
        time.sleep(0.3)


def test_more_engines_than_the_nodes_hold_are_refused_before_loading(cluster: Any) -> None:
    from trencadis.core.engine_config import EngineConfig
    from trencadis.core.errors import StartupError
    from trencadis.core.executor.ray_engine_actors import EnginePlacement

    ray.init(address=cluster.address, log_to_driver=False, namespace="trencadis")
    begun = time.monotonic()
    with pytest.raises(StartupError, match=r"3 engines need 1 CPU each on one node, .* has room for 2"):
        EnginePlacement(EngineConfig(device="cpu"), 3, os.environ)
    took = time.monotonic() - begun
    print(f"\nrefused after {took:.2f} s")
    assert took < 5 * 5
    nothing_left()
