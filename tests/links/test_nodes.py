"""Ranks of other machines as processes: how they are started, killed and started again; flags that do not fit."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.ranks import full_step
from tests.links.peers import FACTORY, group_at, nothing_stays, start
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import rendezvous
from trencadis.core.executor.headless_ranks import HeadlessRanks, make_connect_infos
from trencadis.core.executor.multi_node_launcher import open_listener
from trencadis.core.executor.multiproc_executor import MultiprocExecutor, RankFailed
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo
from trencadis.core.executor.rank_launcher import LocalLauncher
from trencadis.core.links.rank_placement import Topology, topology

KEY = "0123456789abcdefghijklmnopqrstuvwxyz-a-key"
SOON = 6.0


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "group.key"
    path.write_text(KEY)
    path.chmod(0o600)
    return str(path)


def config(key_file: str, **more: Any) -> EngineConfig:
    """The engine's machine of two, with one rank on each."""
    made = EngineConfig(
        tensor_parallel_size=2, nnodes=2, group_key_file=key_file, allow_tp_over_nodes=True, master_port=0, threads=1,
    )  # fmt: skip
    return replace(made, **more)


def followers(engine: EngineConfig, where: tuple[str, int]) -> HeadlessRanks:
    """The other machine's rank."""
    there = replace(engine, node_rank=1, headless=True, master_port=where[1])
    return HeadlessRanks(make_connect_infos(there, topology(there, {}), {}, 30.0))


def killed(key_file: str, seed: int) -> float:
    """A group whose far rank is killed while Steps run; seconds until its caller knew."""
    me = psutil.Process()
    with nothing_stays(lambda: len(me.children())):
        engine = config(key_file)
        listener, _ = open_listener(engine, topology(engine, {}), {})
        far = followers(engine, listener.address)
        group = group_at(listener, group_key_file=key_file)
        try:
            start(group)
            (process,) = [p for p, _ in far._processes]
            shown = (
                Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
            )
            assert KEY.encode() not in shown
            with pytest.raises(RankFailed, match=r"rank 1 \(node 1\) died: it closed its connection"):
                for number in range(10_000):
                    group.submit(full_step(number)).result()
                    if number == 5 + seed:
                        process.send_signal(signal.SIGKILL)
                        begun = time.monotonic()
            took = time.monotonic() - begun
            assert far.wait() == -signal.SIGKILL
        finally:
            group.close()
            far.close()
    return took


def test_a_rank_on_another_machine_that_is_killed_ends_the_group(
    key_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert killed(key_file, 0) < SOON
    assert "rank 1 has come from 127.0.0.1" in caplog.text and KEY not in caplog.text


@pytest.mark.long
def test_twenty_ranks_on_another_machine_are_killed(key_file: str) -> None:
    taken = [killed(key_file, seed) for seed in range(20)]
    print(f"\nkilled: 20 of 20; known after {min(taken):.2f} to {max(taken):.2f} s")
    assert max(taken) < SOON


@pytest.mark.long
def test_eight_ranks_over_tcp_cost_little_host_time(key_file: str) -> None:
    """What ``submit`` takes of the engine's thread without pixels, and what an idle rank takes of a core."""
    engine = config(key_file, tensor_parallel_size=8, nnodes=8)
    listener, _ = open_listener(engine, topology(engine, {}), {})
    far = []
    try:
        for node in range(1, 8):
            there = replace(engine, node_rank=node, headless=True, master_port=listener.address[1])
            far.append(HeadlessRanks(make_connect_infos(there, topology(there, {}), {}, 60.0)))
        group = group_at(listener, world=8, group_key_file=key_file)
        start(group)
        taken = []
        for number in range(400):
            step = replace(full_step(number), images=())
            begun = time.perf_counter()
            pending = group.submit(step)
            taken.append(time.perf_counter() - begun)
            pending.result()
            time.sleep(0.005)
        ranks = [psutil.Process(p.pid) for one in far for p, _ in one._processes]
        before = [sum(rank.cpu_times()[:2]) for rank in ranks]
        time.sleep(5)
        idle = [(sum(rank.cpu_times()[:2]) - b) / 5 for rank, b in zip(ranks, before, strict=True)]
        group.close()
    finally:
        for one in far:
            one.close()
    taken.sort()
    print(f"\nsubmit, 8 TCP ranks: p50 {taken[200] * 1e3:.2f} ms, p90 {taken[360] * 1e3:.2f} ms; idle {max(idle):.1%}")
    assert taken[200] < 5e-3 and max(idle) < 0.1, "five times the bars"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"nnodes": 3}, "--nnodes 3 does not divide 2 ranks"),
        ({"node_rank": 2, "headless": True}, "--node-rank 2 of --nnodes 2"),
        ({"node_rank": 1}, "--node-rank 1: add --headless"),
        ({"headless": True}, "--node-rank 0: leave out --headless"),
        ({"nnodes": 1, "headless": True}, "name --nnodes and --node-rank"),
        ({"nnodes": 1, "node_rank": 1}, "--node-rank 1 of --nnodes 1"),
        ({"allow_tp_over_nodes": False}, "--tensor-parallel-size 2 would span machines.*--allow-tp-over-nodes"),
        ({"group_key_file": ""}, "need a key.*--group-key-file"),
        ({"distributed_executor_backend": "uni"}, "uni is one rank, and there are 2"),
        ({"distributed_executor_backend": "ray"}, "leave one of both out"),
        ({"distributed_executor_backend": "external_launcher"}, "leave one of both out"),
        ({"distributed_executor_backend": "external_launcher", "nnodes": 1}, "RANK, WORLD_SIZE.*torchrun --no-python"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit(key_file: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        topology(config(key_file, **flags), {})


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"WORLD_SIZE": "3"}, "started 3 processes and --tensor-parallel-size asks for 2"),
        ({"RANK": "2"}, "counts otherwise"),
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "would span machines"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
    ],
)
def test_variables_of_torchrun_that_do_not_fit(changed: dict[str, str], words: str) -> None:
    made = EngineConfig(tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    assert topology(made, TORCHRUN) == Topology("external_launcher", 2, 1, 1, 2, alone=True)
    with pytest.raises(StartupError, match=words):
        topology(made, {**TORCHRUN, **changed})


def test_ranks_count_their_cards_on_their_own_machine(key_file: str) -> None:
    made = config(key_file, tensor_parallel_size=2, allow_tp_over_nodes=True)
    there = topology(replace(made, node_rank=1, headless=True, tensor_parallel_size=4), {})
    assert (there.first, there.here, there.leads) == (2, 2, False)
    assert [d.local for d in make_connect_infos(replace(made, tensor_parallel_size=4), there, {}, 1.0)] == [0, 1]
    assert RankInfo(3, 4).local_rank == 3 and RankInfo(3, 4, local=1, ranks_on_machine=2).local_world == 2


def test_pixels_go_to_ranks_that_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks get the same Step, without them."""
    made = EngineConfig(tensor_parallel_size=3)
    real = LocalLauncher.describe_rank
    monkeypatch.setattr(LocalLauncher, "describe_rank", lambda self, n: replace(real(self, n), encodes=n != 2))
    group = MultiprocExecutor(made, FACTORY)
    sent: dict[int, list[int]] = {1: [], 2: []}
    for child in group.children:
        assert child.link is not None
        monkeypatch.setattr(child.link, "send", lambda body, n=child.number: sent[n].append(len(body)))
    step = full_step(1)
    group._broadcast_step(step)
    pixels = step.images[0].pixels.nbytes
    assert sent[1][-1] - sent[2][-1] > pixels - 100
    group._broadcast_step(replace(step, images=()))
    assert sent[1][-1] == sent[2][-1]
    monkeypatch.undo()
    group.close()


def test_the_interface_is_that_of_the_route_to_rank_0() -> None:
    assert rendezvous.interface_to("127.0.0.1") == rendezvous.interface_to("127.9.8.7") == "lo"
    assert rendezvous.interface_to("no-such-host.invalid") == ""


INTERFACES = """
import os, sys
from trencadis.core.executor import rendezvous
groups.keep_to("tcp://127.0.0.1:5")
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_SOCKET_IFNAME"] == "eth7", dict(os.environ)
"""


@pytest.mark.long
def test_interfaces_that_the_user_names_are_left_alone() -> None:
    env = {**os.environ, "NCCL_SOCKET_IFNAME": "eth7"}
    assert subprocess.run([sys.executable, "-P", "-c", INTERFACES], env=env).returncode == 0
