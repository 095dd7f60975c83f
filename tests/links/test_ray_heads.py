"""A Ray cluster whose head ends and comes again under a server: requests end, the server stays, engines come again.

Needs Ray (the extra ``ray``). Ray waits 30 s here, not a minute, until what has lost its head ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest

from tests.fleet.test_live import TEXTS, body, said
from tests.links import clusters
from tests.links.clusters import ray
from tests.links.test_ray import BUSY, SOON, nothing_left
from tests.links.test_ray_engines import FLAGS, LED, PLACED, ask, engines, nothing_runs
from tests.traffic.server_process import RunningServer, free_port, server

pytestmark = pytest.mark.long

TIMES = int(os.environ.get("TRENCADIS_TEST_HEADS", "20"))
AT_A_TIME = 5
"""Heads of one test, which takes some minutes on a busy machine, so that a run may stop and go on with the next."""


class Head:
    """A cluster of a head without a CPU and two nodes, again and again at one address.

    Attributes:
        gone: when the processes of the last one had ended, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.gone = 0.0
        self._port, self._made = free_port(), list[Any]()

    def start(self) -> Any:
        """A new one in the place of the one before."""
        self.end()
        cluster = clusters.cluster(0, 1, 1, gcs_server_port=self._port)
        self._made.append(cluster)
        os.environ["RAY_ADDRESS"] = cluster.address
        return cluster

    def end(self) -> None:
        """Ends the one that is there."""
        while self._made:
            self._made.pop().shutdown()
        self.gone = time.monotonic()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
        patch.setenv("RAY_ADDRESS", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        try:
            yield made
        finally:
            ray.shutdown()
            made.end()


def asking(running: RunningServer, text: str, stop: Event) -> list[tuple[int, float, float]]:
    """Statuses of answers that take a while, one after the other, when each was asked for and when it came."""
    found = []
    while not stop.is_set():
        begun, long = time.monotonic(), body(text, max_tokens=400, ignore_eos=True)
        code = running.http.post("/v1/chat/completions", json=long).status_code
        found.append((code, begun, time.monotonic()))
        stop.wait(0.1)
    return found


def ours() -> list[str]:
    """Command lines of Trencadis' processes below this one, Ray's actors among them."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found.append(" ".join(one.cmdline()))
    return [line for line in found if "trencadis" in line or "RankActor" in line or "EngineActor" in line]


def nothing_stays(cluster: Any) -> None:
    """No process, and so no socket, no actor and no placement group of a server that has ended."""
    nothing_runs()
    ray.init(address=cluster.address, log_to_driver=False)
    nothing_left()
    ray.shutdown()
    end = time.monotonic() + 30
    while left := ours():
        assert time.monotonic() < end, left
        time.sleep(0.3)


def test_a_try_that_fails_leaves_no_process_behind() -> None:
    """A head that is half there would hold its port."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    made: list[psutil.Process] = []

    def work() -> int:
        if made:
            return len(made)
        process = subprocess.Popen([sys.executable, "-c", code])
        made.append(psutil.Process(process.pid))
        while not (below := made[0].children()):
            time.sleep(0.05)
        made.extend(below)
        raise RuntimeError("the node timed out during startup")

    assert clusters.tried(work) == 2
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in made)


@pytest.mark.parametrize("first", range(0, TIMES, AT_A_TIME))
@pytest.mark.parametrize("shape", [PLACED, LED], ids=["two engines", "one engine on two nodes"])
def test_twenty_heads_end_and_come_again(shape: tuple[str, ...], first: int, head: Head, tmp_path: Path) -> None:
    """Steps pass no head: while only that is gone, requests are answered. Once nodes end, too, they end with a 503."""
    texts = TEXTS[:4]
    with server(tmp_path, *FLAGS, seconds=400) as running:
        expected = [said(ask(running, text)) for text in texts]
    cluster = head.start()
    again = latest = 0.0
    with server(tmp_path, *FLAGS, *shape, seconds=600, PYTHONPATH=os.environ["PYTHONPATH"]) as running:
        assert [said(ask(running, text)) for text in texts] == expected
        for number in range(first, min(first + AT_A_TIME, TIMES)):
            cluster.head_node.kill_gcs_server(check_alive=False)
            assert [said(ask(running, text)) for text in texts] == expected, "a request waited for Ray"
            stop = Event()
            with ThreadPoolExecutor(4) as pool:
                answers = [pool.submit(asking, running, text, stop) for text in texts]
                try:
                    cluster = head.start()
                finally:
                    stop.set()
                found = [one for answer in answers for one in answer.result(60)]
            assert {code for code, _, _ in found} <= {200, 503}
            late = max((ended - head.gone for _, begun, ended in found if begun < head.gone < ended), default=0.0)
            latest = max(late, latest)
            begun, end = time.monotonic(), time.monotonic() + 400
            while ask(running, texts[0]).status_code != 200:
                assert time.monotonic() < end and running.process.poll() is None, running.text()[-3000:]
                time.sleep(0.5)
            again = max(again, time.monotonic() - begun)
            assert [said(ask(running, text)) for text in texts] == expected
            print(
                f"\n{number + 1}: open requests ended {late:.1f} s after the nodes, served again after "
                f"{time.monotonic() - begun:.1f} s",
                flush=True,
            )
        assert len(engines()) == (2 if shape is PLACED else 1)
    print(
        f"\nheads {first + 1} to {number + 1} ended: open requests ended {latest:.1f} s after the nodes at the latest, "
        f"served again after at most {again:.1f} s"
    )
    assert latest < SOON + BUSY
    nothing_stays(cluster)
