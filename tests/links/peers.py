"""Ranks that come to an engine over TCP: threads of this process, which speak the protocol and compute nothing."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tests.fakes import ranks as fake_ranks
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor import rank_messages
from trencadis.core.executor.headless_ranks import connect_to_engine
from trencadis.core.executor.multi_node_launcher import NodesLauncher
from trencadis.core.executor.multiproc_executor import MultiprocExecutor
from trencadis.core.executor.rank_info_and_fingerprint import RankFingerprint, RankInfo, compute_rank_fingerprint
from trencadis.core.links.authenticated_link import HeartbeatThread, KeyedLink
from trencadis.core.links.group_key import GroupKey, TlsFiles
from trencadis.core.links.message_link import LinkClosed
from trencadis.core.links.rank_listener import AuthListener
from trencadis.core.links.rank_placement import Topology

FACTORY = "tests.fakes.ranks:make"


class Peer:
    """A rank that answers as ``tests.fakes.ranks`` does.

    Attributes:
        steps: what it was told.
        why: how its link ended.
    """

    def __init__(
        self,
        key: GroupKey,
        address: tuple[str, int],
        number: int,
        facts: RankFingerprint | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.steps: list[rank_messages.RunStep] = []
        self.why = ""
        self.said_goodbye = False
        self._facts = facts
        self._dial = rank_messages.ConnectInfo(
            *address, number, number, 2, key=key.export_bytes(), patience=5.0, tls=tls or TlsFiles()
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            link = connect_to_engine(self._dial)
        except Exception as error:
            self.why = str(error)
            return
        pulse = HeartbeatThread(lambda: link.beat(True))
        try:
            self._serve(link)
        except LinkClosed as error:
            self.why = str(error)
        finally:
            pulse.end()
            link.close()

    def _serve(self, link: KeyedLink) -> None:
        rank = fake_ranks.FakeRank("", RankInfo(self._dial.rank, 2))
        while True:
            match rank_messages.decode_down(link.receive()):
                case rank_messages.StartRank(config):
                    link.send(
                        rank_messages.encode(
                            rank_messages.RendezvousJoined(self._facts or compute_rank_fingerprint(config.model))
                        )
                    )
                case rank_messages.RendezvousDone():
                    link.send(rank_messages.encode(rank_messages.RankReady()))
                case rank_messages.RunStep(step) as told:
                    self.steps.append(told)
                    output = rank.execute(step).result()
                    link.send(rank_messages.encode(rank_messages.StepDone(step.number, rank_messages.digest(output))))
                case rank_messages.RunWarmup():
                    rank.warm()
                case rank_messages.Shutdown():
                    self.said_goodbye = True
                    return


def group_at(listener: AuthListener, world: int = 2, mode: str = "", **config: object) -> MultiprocExecutor:
    """The engine's side of ``world`` ranks on as many machines, this one among them."""
    made = replace(EngineConfig(policy=mode, tensor_parallel_size=world, nnodes=world), **config)  # type: ignore[arg-type]
    launcher = NodesLauncher(made, Topology("mp", world, world), listener, "tcp://127.0.0.1:9")
    return MultiprocExecutor(made, FACTORY, launcher)


def start(group: MultiprocExecutor) -> None:
    group.start(lambda place: fake_ranks.make(group._config, place))


@contextmanager
def nothing_stays(children: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Threads, descriptors and processes are as many afterwards as before."""
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd")), children()
    yield
    end = time.monotonic() + 5
    while True:
        gc.collect()
        now = threading.active_count(), len(os.listdir("/proc/self/fd")), children()
        if all(a <= b for a, b in zip(now, before, strict=True)):
            return
        if time.monotonic() > end:
            raise AssertionError(f"{now} threads, descriptors and processes, before {before}")
        time.sleep(0.05)


@contextmanager
def recorded(monkeypatch: object) -> Iterator[None]:
    """Every message that a decoder sees was sent as it is, once: nothing unauthenticated reaches msgpack."""
    sent: list[bytes] = []
    lock = threading.Lock()
    real_send, real_up, real_down = KeyedLink.send, rank_messages.decode_up, rank_messages.decode_down

    def send(self: KeyedLink, body: bytes) -> None:
        with lock:
            sent.append(bytes(body))
        real_send(self, body)

    def check(body: bytes) -> None:
        with lock, suppress(ValueError):
            sent.remove(bytes(body))
            return
        raise AssertionError("bytes were decoded that nobody sent")

    def up(body: bytes) -> object:
        check(body)
        return real_up(body)

    def down(body: bytes) -> object:
        check(body)
        return real_down(body)

    patch = monkeypatch
    patch.setattr(KeyedLink, "send", send)  # type: ignore[attr-defined]
    patch.setattr(rank_messages, "decode_up", up)  # type: ignore[attr-defined]
    patch.setattr(rank_messages, "decode_down", down)  # type: ignore[attr-defined]
    yield
