"""Engines on a Ray cluster, with a stand-in for Ray whose actors are objects of this process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.command_line import from_command_line
from trencadis.core.devices import CARD_VARIABLES
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor import ray_access_and_node_placement, ray_broker_process, ray_engines
from trencadis.core.executor import ray_engine_actors as on_node
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.executor.rank_info_and_fingerprint import compute_rank_fingerprint
from trencadis.core.executor.ray_access_and_node_placement import ClusterNode, assign_engine_nodes
from trencadis.core.executor.ray_engine_actors import EngineActor, EnginePlacement
from trencadis.core.process import engine_messages
from trencadis.server.processes import start_engines as starting
from trencadis.server.processes.start_engines import divide_resources_over_nodes, start_engines

WAIT = 10.0


class Engine:
    """In place of a process: says back what it is sent, until it is killed or its socket is closed."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.pid = config, 0
        self.returncode: int | None = None
        ours, self.sock = socket.socketpair()
        self.handle = EngineHandle(self, ours)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while data := self.sock.recv(1 << 16):
                self.sock.sendall(data)
        except OSError:
            pass
        self.kill()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9 if self.returncode is None else self.returncode
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode or 0


class Ray:
    """Starts actors in this process, as soon as their bundle is there."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.actors: list[Any] = []
        self.killed: list[Any] = []
        self.brokers: list[tuple[socket.socket, threading.Thread]] = []
        self.removed = 0
        self.nodes = [ClusterNode("head", "127.0.0.1", 0, 0, here=True), ClusterNode("a", "127.0.0.1", 4, 4)]

    def get(self, work: Any, timeout: float | None = None) -> Any:
        return work()

    def kill(self, actor: Any) -> None:
        if actor not in self.killed:
            self.killed.append(actor)
            actor.real._end()

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="127.0.0.1:6379")

    def taking(self, ray: Any, kind: type, group: Any, bundle: int, resource: str, count: int) -> Any:
        return self._made(kind, bundle=(bundle, resource, count), node="")

    def beside(self, ray: Any, kind: type, node: str) -> Any:
        return self._made(kind, bundle=(), node=node)

    def _made(self, kind: type, **where: Any) -> Any:
        real: Any = kind()
        start = SimpleNamespace(remote=lambda *reported: lambda: real.start(*reported))
        made = SimpleNamespace(real=real, start=start, **where)
        self.actors.append(made)
        return made

    def actor(self, bundle: int) -> Any:
        """The newest actor of a bundle."""
        return next(actor for actor in reversed(self.actors) if actor.bundle[:1] == (bundle,))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    made = Ray()

    def spawned(config: EngineConfig) -> EngineHandle:
        made.engines.append(Engine(config))
        return made.engines[-1].handle

    def removed(group: Any) -> None:
        made.removed += 1

    def brokered() -> tuple[Any, socket.socket]:
        ours, reference = socket.socketpair()
        thread = threading.Thread(target=ray_broker_process.serve_broker, args=(reference,), daemon=True)
        thread.start()
        made.brokers.append((reference, thread))
        return SimpleNamespace(wait=thread.join), ours

    monkeypatch.setattr(ray_engines, "start_broker_process", brokered)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    monkeypatch.setattr(on_node, "spawn_engine", spawned)
    for name, stand_in in {
        "connect": lambda environ: made,
        "await_free_nodes": lambda *a: made.nodes,
        "nodes_of": lambda *a: made.nodes,
        "create_engine_group": lambda *a: "group", "create_actor_in_bundle": made.taking,
        "create_actor_on_node": made.beside, "remove_group": removed,
    }.items():  # fmt: skip
        monkeypatch.setattr(ray_access_and_node_placement, name, stand_in)
    yield made
    for engine in made.engines:
        engine.kill()


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = sock.recv(size - len(data))
        assert got, "the socket ended"
        data += got
    return data


def until(condition: Any) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def placed(ray: Ray, size: int = 2, **options: Any) -> list[EngineHandle]:
    config = EngineConfig(device="cpu", tensor_parallel_size=2, **options)
    handles: list[EngineHandle] = []
    start_engines(config, size, "ray", handles.append)
    for handle in handles:
        handle.sock.settimeout(WAIT)
    return handles


def test_bytes_of_a_placed_engine_cross_as_those_of_a_process_here(ray: Ray) -> None:
    handles = placed(ray)
    sent = os.urandom(3 << 20)  # pixels are more than a message of the link
    for handle in handles:
        threading.Thread(target=handle.sock.sendall, args=(sent,)).start()
        assert exactly(handle.sock, len(sent)) == sent
    assert sorted(a.bundle for a in ray.actors) == [(0, "CPU", 2), (1, "CPU", 2)]
    assert all(e.config.report_evictions and e.config.threads for e in ray.engines)
    for handle in handles:
        handle.kill()
        assert handle.process.poll() is not None
    until(lambda: len(ray.killed) == 2)
    until(lambda: all(e.returncode is not None for e in ray.engines))


def test_an_engine_that_dies_on_another_machine_ends_its_socket_here_and_gets_a_successor_in_its_bundle(
    ray: Ray,
) -> None:
    other, first = placed(ray)
    first.sock.sendall(b"once")
    assert exactly(first.sock, 4) == b"once"
    ray.actor(1).real._handle.process.kill()
    assert first.sock.recv(1) == b""
    until(lambda: first.process.poll() is not None)
    first.kill()
    second = first.start_successor(EngineConfig(device="cpu", tensor_parallel_size=2))
    second.sock.settimeout(WAIT)
    second.sock.sendall(b"again")
    assert exactly(second.sock, 5) == b"again"
    assert ray.actors[-1].bundle == (1, "CPU", 2) and len(ray.killed) == 1
    other.sock.sendall(b"still here")
    assert exactly(other.sock, 10) == b"still here"
    other.kill()
    second.kill()


def read_message(handle: EngineHandle) -> str:
    size, _ = engine_messages.HEADER.unpack(exactly(handle.sock, engine_messages.HEADER.size))
    said = engine_messages.decode_up(exactly(handle.sock, size))
    assert isinstance(said, engine_messages.Fatal) and said.code == 2
    return said.message


def test_a_node_with_another_version_says_so_before_it_loads(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = compute_rank_fingerprint("")
    monkeypatch.setattr(
        on_node, "compute_rank_fingerprint", lambda model: type(mine)("0.0.1", mine.python, mine.torch, "")
    )
    (handle,) = placed(ray, 1)
    assert "has Trencadis 0.0.1, the engine" in read_message(handle)
    assert not ray.engines and handle.sock.recv(1) == b"" and handle.process.poll() == 2


def test_an_actor_that_ray_cannot_start_ends_its_engine_with_ray_s_last_line(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, *reported: Any) -> str:
        raise RuntimeError("a long report\nNo module named 'trencadis'")

    monkeypatch.setattr(EngineActor, "start", fails)
    (handle,) = placed(ray, 1)
    assert read_message(handle) == "Ray did not start engine 0: No module named 'trencadis'"


def test_what_has_no_room_on_the_cluster_is_refused_with_both_counts() -> None:
    nodes = [ClusterNode("a", "10.0.0.1", 8, 3), ClusterNode("b", "10.0.0.2", 8, 8)]
    assert [n.id for n in assign_engine_nodes(nodes, 3, 2, "GPU")] == ["a", "b", "b"]
    with pytest.raises(StartupError, match=r"2 engines need 8 GPU each on one node, .* room for 1 \(10.0.0.1 3"):
        assign_engine_nodes(nodes, 2, 8, "GPU")


def test_engines_of_other_nodes_count_their_cards_from_zero_and_share_what_a_node_has() -> None:
    dealt = divide_resources_over_nodes(
        EngineConfig(device="hpu", tensor_parallel_size=2, kv_offloading_size=8.0), 3, 2
    )
    assert [(c.device, c.kv_offloading_size, c.report_evictions) for c in dealt] == [("hpu", 4.0, True)] * 3
    cpus = divide_resources_over_nodes(EngineConfig(device="cpu"), 3, 2, {"OMP_NUM_THREADS": "8"})
    assert [c.threads for c in cpus] == [4] * 3
    with pytest.raises(StartupError, match="--device hpu:1: Ray chooses"):
        divide_resources_over_nodes(EngineConfig(device="hpu:1"), 2, 1)


def test_a_placed_engine_has_its_ranks_on_its_node() -> None:
    settings = from_command_line(["m", "-dp", "2", "--data-parallel-backend", "ray"], {})
    assert settings.server.data_parallel_backend == "ray"
    with pytest.raises(StartupError, match="on one node with all its ranks"):
        start_engines(EngineConfig(distributed_executor_backend="ray"), 2, "ray", lambda handle: None)


def led(ray: Ray, **options: Any) -> list[EngineHandle]:
    """An engine of two stages on two nodes, as the server starts it."""
    handles: list[EngineHandle] = []
    config = EngineConfig(device="cpu", pipeline_parallel_size=2, distributed_executor_backend="ray", **options)
    start_engines(config, 1, "mp", handles.append)
    return handles


def test_an_engine_goes_where_its_first_rank_has_a_card_and_its_successor_where_there_is_one_then(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", ray_access_and_node_placement.OWN_NODE, *CARD_VARIABLES):
        monkeypatch.setenv(name, "")
    ray.nodes += [ClusterNode("b", "127.0.0.1", 1, 1)]
    (first,) = led(ray)
    first.sock.settimeout(WAIT)
    first.sock.sendall(b"a step")
    assert exactly(first.sock, 6) == b"a step"
    assert [a.node for a in ray.actors] == ["a"] and ray.engines[0].config.pipeline_parallel_size == 2
    assert (os.environ[ray_access_and_node_placement.OWN_NODE], os.environ["RAY_ADDRESS"]) == ("a", "127.0.0.1:6379")
    assert not any(name in os.environ for name in CARD_VARIABLES), "a card that was hidden stays so"
    ray.nodes[1:] = [ClusterNode("b", "127.0.0.1", 1, 1), ClusterNode("c", "127.0.0.1", 1, 1)]
    first.kill()
    second = first.start_successor(ray.engines[0].config)
    second.sock.settimeout(WAIT)
    second.sock.sendall(b"again")
    assert exactly(second.sock, 5) == b"again" and ray.actors[-1].node == "b"
    second.kill()
    ray.nodes[1:] = [ClusterNode("c", "127.0.0.1", 1, 1)]
    assert "2 ranks need 2 CPU, and the Ray cluster has 1 free of 1" in read_message(
        second.start_successor(ray.engines[0].config)
    )


def test_an_engine_stays_here_where_this_node_has_a_card(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process joins the cluster by itself; this one leaves it."""
    here: list[EngineConfig] = []
    monkeypatch.setattr(starting, "spawn_engine", lambda config: here.append(config))
    ray.nodes[0] = ClusterNode("head", "127.0.0.1", 1, 1, here=True)
    led(ray)
    assert len(here) == 1 and not ray.actors and not ray.brokers[0][1].is_alive()


def test_an_engine_that_no_node_can_hold_is_refused_at_the_start(ray: Ray) -> None:
    ray.nodes[1:] = [ClusterNode("a", "127.0.0.1", 1, 1)]
    with pytest.raises(StartupError, match=r"2 ranks need 2 CPU, and the Ray cluster has 1 free of 1"):
        led(ray)
    ray.nodes[1:] = [ClusterNode("a", "127.0.0.1", 1, 0)]
    with pytest.raises(StartupError, match=r"2 ranks need 2 CPU, and the Ray cluster has none free .*0 free of 1"):
        led(ray)


def test_a_broker_that_ray_has_ended_is_replaced_for_the_next_engine(ray: Ray) -> None:
    """What waited for it ends; an engine that runs goes on."""
    first, second = placed(ray)
    for handle in (first, second):
        handle.sock.sendall(b"up")
        assert exactly(handle.sock, 2) == b"up"
    ray.brokers[0][0].shutdown(socket.SHUT_RDWR)
    until(lambda: first.process._starter._lost)  # type: ignore[attr-defined]
    first.kill()
    third = first.start_successor(EngineConfig(device="cpu", tensor_parallel_size=2))
    third.sock.settimeout(WAIT)
    third.sock.sendall(b"new")
    assert exactly(third.sock, 3) == b"new" and len(ray.brokers) == 2
    second.sock.sendall(b"still")
    assert exactly(second.sock, 5) == b"still"
    ray.nodes = ray.nodes[:1]
    ray.brokers[1][0].shutdown(socket.SHUT_RDWR)
    until(lambda: third.process._starter._lost)  # type: ignore[attr-defined]
    second.kill()
    assert "the Ray cluster has room for 0" in read_message(
        second.start_successor(EngineConfig(device="cpu", tensor_parallel_size=2))
    )
    third.kill()


def test_a_broker_of_a_head_that_has_come_again_ends(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps its connection, and refuses whatever it asks."""
    (first,) = placed(ray, 1)
    first.sock.sendall(b"up")
    assert exactly(first.sock, 2) == b"up"
    first.kill()

    def refused(work: Any, timeout: float | None = None) -> Any:
        raise RuntimeError("RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted.")

    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", refused)
        assert "the Ray cluster that had reserved resources for engines is gone" in read_message(
            first.start_successor(first_config())
        )
    until(lambda: not ray.brokers[0][1].is_alive())
    second = first.start_successor(first_config())
    second.sock.settimeout(WAIT)
    second.sock.sendall(b"new")
    assert exactly(second.sock, 3) == b"new" and len(ray.brokers) == 2
    second.kill()


def first_config() -> EngineConfig:
    return EngineConfig(device="cpu", tensor_parallel_size=2)


def test_a_placement_that_is_closed_gives_its_group_back(ray: Ray) -> None:
    EnginePlacement(EngineConfig(device="cpu"), 2, {}).close()
    assert ray.removed == 1
