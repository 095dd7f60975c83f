"""A Ray cluster whose head ends and comes again under a server: requests end, the server stays, engines come again.

Needs Ray (the extra ``ray``). Ray waits 30 s here, not a minute, until what has lost its head ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.test_live import TEXTS, said
from tests.links import clusters
from tests.links.test_ray_engines import FLAGS, LED, PLACED, ask, engines, nothing_runs
from tests.traffic.server_process import free_port, server

pytestmark = pytest.mark.long

TIMES = int(os.environ.get("TRENCADIS_TEST_HEADS", "20"))
AT_A_TIME = 5
"""Heads of one test, which takes some minutes on a busy machine, so that a run may stop and go on with the next."""


@pytest.fixture
def head() -> Iterator[Callable[[], Any]]:
    """Starts a cluster of a head without a CPU and two nodes, in the place of the one before."""
    port, made = free_port(), list[Any]()

    def start() -> Any:
        end()
        cluster = clusters.cluster(0, 1, 1, gcs_server_port=port)
        made.append(cluster)
        os.environ["RAY_ADDRESS"] = cluster.address
        return cluster

    def end() -> None:
        while made:
            made.pop().shutdown()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
        patch.setenv("RAY_ADDRESS", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        try:
            yield start
        finally:
            end()


@pytest.mark.parametrize("first", range(0, TIMES, AT_A_TIME))
@pytest.mark.parametrize("shape", [PLACED, LED], ids=["two engines", "one engine on two nodes"])
def test_twenty_heads_end_and_come_again(
    shape: tuple[str, ...], first: int, head: Callable[[], Any], tmp_path: Path
) -> None:
    """Steps pass no head: while only that is gone, requests are answered. Once nodes end, too, they end with a 503."""
    texts = TEXTS[:4]
    with server(tmp_path, *FLAGS, seconds=400) as running:
        expected = [said(ask(running, text)) for text in texts]
    cluster = head()
    again = 0.0
    with server(tmp_path, *FLAGS, *shape, seconds=600, PYTHONPATH=os.environ["PYTHONPATH"]) as running:
        assert [said(ask(running, text)) for text in texts] == expected
        for number in range(first, min(first + AT_A_TIME, TIMES)):
            cluster.head_node.kill_gcs_server(check_alive=False)
            assert [said(ask(running, text)) for text in texts] == expected, "a request waited for Ray"
            with ThreadPoolExecutor(4) as pool:
                answers = [pool.submit(ask, running, text) for text in texts * 2]
                cluster = head()
                codes = {answer.result(60).status_code for answer in answers}
            assert codes <= {200, 503}
            begun, end = time.monotonic(), time.monotonic() + 400
            while ask(running, texts[0]).status_code != 200:
                assert time.monotonic() < end and running.process.poll() is None, running.text()[-3000:]
                time.sleep(0.5)
            again = max(again, time.monotonic() - begun)
            assert [said(ask(running, text)) for text in texts] == expected
            print(f"\n{number + 1}: served again after {time.monotonic() - begun:.1f} s", flush=True)
        assert len(engines()) == (2 if shape is PLACED else 1)
    print(f"\nheads {first + 1} to {number + 1} ended: served again after at most {again:.1f} s")
    nothing_runs()
